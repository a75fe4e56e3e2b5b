"""`convert_to_fp8` of Linen: wraps a module so that layers multiply in FP8.

The layers of a Linen module exist while it runs. So the conversion is a wrapper module without variables, which sets
the operation of each of them at the beginning of its call.
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

# The attribute in which each kind of layer finds its multiplying function.
OPERATIONS: tuple[tuple[tuple[type[nn.Module], ...], str, type[Fp8Op]], ...] = (
    ((nn.Dense, nn.DenseGeneral), "dot_general", Fp8DotGeneralOp),
    ((nn.Conv, nn.ConvLocal), "conv_general_dilated", Fp8ConvGeneralDilatedOp),
)
UNSUPPORTED = ((nn.Einsum, "__call__"), (nn.ConvTranspose, "__call__"), (nn.Embed, "attend"))
"""Layers with a kernel that have no such place, and the method that multiplies."""


class _Make(NamedTuple):
    """Makes a layer's operation.

    Equal for equal settings, so layers are equal; `functools.partial` never is.
    """

    kind: type[Fp8Op]
    scaling: Scaling

    def __call__(self) -> Fp8Op:
        """Return an operation with its own state."""
        return self.kind(scaling=self.scaling)


class _Converted(nn.Module):
    """A module with FP8 layers and the original variable names.

    Attributes:
        converted_module: The module.
        rules: Which layers, by their dotted names.
        scaling: For rules that name no recipe.
    """

    converted_module: nn.Module
    rules: Rules | Callable[[Any, str], bool]
    scaling: Scaling

    def setup(self) -> None:
        """Give the module's variables no name in front."""
        nn.share_scope(self, self.converted_module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module.

        Raises:
            Fp8Error: No layer was converted, or a recipe is not supported.
        """
        decided: dict[str, str] = {}  # why a layer is left out; empty if it is converted

        def intercept(call: Callable[..., Any], args: Any, kwargs: Any, context: Any) -> Any:
            module, method = context.module, context.method_name
            row = next((row for row in OPERATIONS if isinstance(module, row[0]) and method == "__call__"), None)
            if row is None and not any(isinstance(module, kind) and method == name for kind, name in UNSUPPORTED):
                return call(*args, **kwargs)
            # layers that were attributes before `setup` ran have the name of the attribute in front, others have not
            names = module.path[len(self.path) :]
            name = ".".join(names[1:] if names[:1] == ("converted_module",) else names)
            scaling = self._scaling_of(module, name)
            if scaling is None:
                decided[name] = "by the rules"
            elif row is None:
                decided[name] = f"{type(module).__name__} has no FP8 matmul here"
            # An operation that the user has given the layer, under either of flax's names for it, is kept.
            elif any(getattr(module, f"{row[1]}{end}", None) for end in ("", "_cls")):
                decided[name] = "it has a matmul of its own"
            else:
                decided[name] = ""
                changed: dict[str, Any] = {f"{row[1]}_cls": _Make(row[2], scaling)}
                if row[1] == "dot_general" and module.promote_dtype is dtypes.promote_dtype:
                    changed["promote_dtype"] = promote_dtype
                before = {name: getattr(module, name) for name in changed}
                # set like this, because flax freezes attributes outside of `setup`
                for attribute, value in changed.items():
                    object.__setattr__(module, attribute, value)
                try:
                    return call(*args, **kwargs)
                finally:
                    for attribute, value in before.items():
                        object.__setattr__(module, attribute, value)
            return call(*args, **kwargs)

        with nn.intercept_methods(intercept):
            result = self.converted_module(*args, **kwargs)
        if all(decided.values()):
            raise Fp8Error(
                f"No layer of {type(self.converted_module).__name__} was converted. Check the rules and the model."
            )
        if self.is_initializing():
            log_conversion(logger, decided)
        return result

    def __repr__(self) -> str:
        """Return the module in the call that has converted it."""
        return f"convert_to_fp8({self.converted_module!r}, rules={self.rules!r}, scaling={self.scaling!r})"

    def _scaling_of(self, layer: nn.Module, name: str) -> Scaling | None:
        if isinstance(self.rules, Rules):
            decision = self.rules.match(name)
            return as_scaling(decision.recipe or self.scaling) if decision.include else None
        return self.scaling if self.rules(layer, name) else None


def convert_to_fp8(module: nn.Module, rules: RulesOrFilter = (), scaling: ScalingChoice | None = None) -> nn.Module:
    """Return `module` with FP8 matmuls in its Dense and Conv layers.

    These are `nn.Dense`, `nn.DenseGeneral` and `nn.Conv`.

    Parameters keep their names and shapes; the state of the matmuls is in the collection `_overwrite_with_gradient`.
    Layers with a custom operation keep it.

    Args:
        module: The module; it is called by its `__call__`.
        rules: Which layers, by their dotted names (`Dense_0`, `encoder.mlp.up`), as `fp8_common.Rules` describes; all
            by default. Or a function `(layer, name) -> bool`.
        scaling: For rules that name no recipe; None is `DelayedScaling()`.

    Raises:
        Fp8Error: A rule cannot be read; when it is called: no layer was converted.
    """
    decide = rules if callable(rules) else Rules.parse(rules)
    return _Converted(module, decide, as_scaling(scaling or DelayedScaling()))
