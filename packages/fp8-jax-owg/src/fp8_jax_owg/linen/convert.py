"""`convert_to_fp8` wraps a Linen module so that selected layers multiply in FP8.

The layers of a Linen module exist only while it runs. So the conversion is a wrapper module without variables, which
sets the operation of each selected layer for the duration of the layer's call.
"""

import logging
from collections.abc import Callable
from typing import Any, NamedTuple

from flax import linen as nn
from flax.linen import dtypes

from fp8_common import Fp8Error, Rules
from fp8_jax_owg.linen.operations import Fp8ConvGeneralDilatedOp, Fp8DotGeneralOp, Fp8Op, promote_dtype
from fp8_jax_owg.reports import log_conversion
from fp8_jax_owg.scaling import DelayedScaling, RulesOrFilter, Scaling, ScalingChoice, as_scaling

logger = logging.getLogger(__name__)

# For each type of layer: the attribute that holds its multiplying function, and the FP8 operation.
OPERATIONS: tuple[tuple[tuple[type[nn.Module], ...], str, type[Fp8Op]], ...] = (
    ((nn.Dense, nn.DenseGeneral), "dot_general", Fp8DotGeneralOp),
    ((nn.Conv,), "conv_general_dilated", Fp8ConvGeneralDilatedOp),
)
# `nn.ConvLocal` multiplies by `lax.conv_general_dilated_local`, which no attribute replaces.
UNSUPPORTED = (
    (nn.Einsum, "__call__"),
    (nn.ConvLocal, "__call__"),
    (nn.ConvTranspose, "__call__"),
    (nn.Embed, "attend"),
)
"""Layers with a kernel whose multiplying function cannot be replaced, and the method that multiplies."""


class _Make(NamedTuple):
    """Factory of a layer's operation.

    Factories with equal settings are equal, and so are layers that have them; two `functools.partial` never are.
    """

    kind: type[Fp8Op]
    scaling: Scaling

    def __call__(self) -> Fp8Op:
        """Return a new operation, which has its own state."""
        return self.kind(scaling=self.scaling)


class _Converted(nn.Module):
    """Module with FP8 layers and the original variable names.

    Attributes:
        converted_module: Module whose layers are converted.
        rules: Rules for the dotted names of layers, or a function `(layer, name) -> bool`.
        scaling: Scaling for rules that name no recipe.
    """

    converted_module: nn.Module
    rules: Rules | Callable[[Any, str], bool]
    scaling: Scaling

    def setup(self) -> None:
        """Share the module's scope, so that variable names get no prefix."""
        nn.share_scope(self, self.converted_module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module with its selected layers converted.

        Raises:
            Fp8Error: If no layer was converted, or a recipe is not supported.
        """
        reasons: dict[str, str] = {}  # for each layer, why it is left out; empty if it is converted

        def intercept(call: Callable[..., Any], args: Any, kwargs: Any, context: Any) -> Any:
            module, method = context.module, context.method_name
            row = next((row for row in OPERATIONS if isinstance(module, row[0]) and method == "__call__"), None)
            if row is None and not any(isinstance(module, kind) and method == name for kind, name in UNSUPPORTED):
                return call(*args, **kwargs)
            # Layers that were attributes before `setup` ran have the name of the attribute as a prefix, others do not.
            names = module.path[len(self.path) :]
            name = ".".join(names[1:] if names[:1] == ("converted_module",) else names)
            scaling = self._scaling_of(module, name)
            if scaling is None:
                reasons[name] = "by the rules"
            elif row is None:
                reasons[name] = f"{type(module).__name__} has no FP8 matmul here"
            # A layer with a custom operation, under either of flax's names for it, keeps it.
            elif any(getattr(module, f"{row[1]}{end}", None) for end in ("", "_cls")):
                reasons[name] = "it has a custom operation"
            else:
                reasons[name] = ""
                attributes: dict[str, Any] = {f"{row[1]}_cls": _Make(row[2], scaling)}
                if row[1] == "dot_general" and module.promote_dtype is dtypes.promote_dtype:
                    attributes["promote_dtype"] = promote_dtype
                before = {name: getattr(module, name) for name in attributes}
                # By `object.__setattr__`, because flax freezes attributes outside of `setup`.
                for attribute, value in attributes.items():
                    object.__setattr__(module, attribute, value)
                try:
                    return call(*args, **kwargs)
                finally:
                    for attribute, value in before.items():
                        object.__setattr__(module, attribute, value)
            return call(*args, **kwargs)

        with nn.intercept_methods(intercept):
            result = self.converted_module(*args, **kwargs)
        if all(reasons.values()):
            raise Fp8Error(
                f"No layer of {type(self.converted_module).__name__} was converted. Check the rules and the model."
            )
        if self.is_initializing():
            log_conversion(logger, reasons)
        return result

    def __repr__(self) -> str:
        """Return the call of `convert_to_fp8` that made this module."""
        return f"convert_to_fp8({self.converted_module!r}, rules={self.rules!r}, scaling={self.scaling!r})"

    def _scaling_of(self, layer: nn.Module, name: str) -> Scaling | None:
        if isinstance(self.rules, Rules):
            decision = self.rules.match(name)
            return as_scaling(decision.recipe or self.scaling) if decision.include else None
        return self.scaling if self.rules(layer, name) else None


def convert_to_fp8(module: nn.Module, rules: RulesOrFilter = (), scaling: ScalingChoice | None = None) -> nn.Module:
    """Return a module whose Dense and Conv layers multiply in FP8.

    It converts `nn.Dense`, `nn.DenseGeneral` (and so attention) and `nn.Conv`. Parameters keep their names and shapes.
    The state of the matmuls is in the collection `_overwrite_with_gradient`. Layers with a custom operation keep it.

    Args:
        module: Module to convert; only its `__call__` is converted. It is not changed.
        rules: Rules for the dotted names of layers (`Dense_0`, `encoder.mlp.up`), see `fp8_common.Rules`; all layers by
            default. A rule may name a recipe. Or a function `(layer, name) -> bool`.
        scaling: Scaling for rules that name no recipe; None is `DelayedScaling()`.

    Returns:
        A module with the same variables in addition to the state.

    Raises:
        Fp8Error: If a rule is not valid. A call of the result raises if it converts no layer.
    """
    decide = rules if callable(rules) else Rules.parse(rules)
    return _Converted(module, decide, as_scaling(scaling or DelayedScaling()))
