"""`convert_to_fp8` converts selected layers of an NNX model in place."""

import inspect
import logging
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from flax import nnx
from flax.nnx.nn import dtypes

from fp8_common import Fp8Error, Rules
from fp8_common.rules import Decision
from fp8_jax_owg.nnx.operations import Fp8ConvGeneralDilatedOp, Fp8DotGeneralOp, Fp8EinsumOp, Fp8Op, promote_dtype
from fp8_jax_owg.reports import log_conversion
from fp8_jax_owg.scaling import RulesOrFilter, ScalingChoice

logger = logging.getLogger(__name__)

Model = TypeVar("Model", bound=nnx.Module)

# For each type of layer: the attribute that holds its multiplying function, the FP8 operation, and the shape of one
# kernel. Layers that `nnx.vmap` has stacked have more leading dimensions.
LAYERS: dict[type[nnx.Module], tuple[str, type[Fp8Op], Callable[[Any], Sequence[int]]]] = {
    nnx.Linear: ("dot_general", Fp8DotGeneralOp, lambda layer: (layer.in_features, layer.out_features)),
    nnx.LinearGeneral: (
        "dot_general",
        Fp8DotGeneralOp,
        lambda layer: (*layer.batch_axis.values(), *layer.in_features, *layer.out_features),
    ),
    nnx.Einsum: ("einsum_op", Fp8EinsumOp, lambda layer: layer.kernel_shape),
    nnx.Conv: ("conv_general_dilated", Fp8ConvGeneralDilatedOp, lambda layer: layer.kernel_shape),
}
UNSUPPORTED = (nnx.ConvTranspose, nnx.LoRA)
"""Layers with a kernel whose multiplying function cannot be replaced."""


def convert_to_fp8(model: Model, rules: RulesOrFilter = (), scaling: ScalingChoice | None = None) -> Model:
    """Convert the layers of a model to FP8 matmuls, in place.

    Call it before `nnx.split`, `nnx.jit` and the optimizer. It converts `nnx.Linear`, `nnx.LinearGeneral` (and so
    attention), `nnx.Einsum` and `nnx.Conv`. Parameters keep their places and values. With delayed scaling, each
    converted layer gets state of type `OverwriteWithGradient`.

    Args:
        model: Model, or a single layer.
        rules: Rules for the dotted names of layers (`blocks.0.mlp.up`), see `fp8_common.Rules`; all layers by default.
            A rule may name a recipe. Or a function `(layer, name) -> bool`.
        scaling: Scaling for rules that name no recipe: `DelayedScaling`, `CurrentScaling`, or a recipe of
            `fp8_common`; None is `DelayedScaling()`.

    Returns:
        The model.

    Raises:
        Fp8Error: If no layer is selected, a rule has no effect, a recipe is not supported, or a selected layer is
            converted already, has a custom `__call__` without its operation, or is stacked along other than leading
            dimensions.
    """
    modules = {".".join(map(str, path)): module for path, module in nnx.iter_modules(model)}
    layers = {name: module for name, module in modules.items() if isinstance(module, tuple(LAYERS))}
    unsupported = {
        name: f"{type(module).__name__} has no FP8 matmul here"
        for name, module in modules.items()
        if isinstance(module, UNSUPPORTED)
    }
    if callable(rules):
        decisions = [Decision(fqn=name, include=bool(rules(layer, name))) for name, layer in layers.items()]
    else:
        decisions = Rules.parse(rules).apply(layers)
    included = [decision for decision in decisions if decision.include]
    if not included:
        raise Fp8Error(
            f"No layer to convert among {len(layers)} supported ones ({', '.join(list(layers)[:3]) or 'none'}). "
            "Check the rules and the model."
        )
    # All operations are created before the first one is set, so that an error leaves the model unchanged.
    operations = [(layers[decision.fqn], *_operation(layers[decision.fqn], decision, scaling)) for decision in included]
    for layer, attribute, operation in operations:
        # NNX holds functions as static attributes. An operation is a module, hence data.
        setattr(layer, attribute, nnx.data(operation))
        if attribute == "dot_general" and getattr(layer, "promote_dtype", None) is dtypes.promote_dtype:
            setattr(layer, "promote_dtype", promote_dtype)  # noqa: B010  (not of every layer)
    reasons = {decision.fqn: "" if decision.include else "by the rules" for decision in decisions}
    log_conversion(logger, reasons | unsupported)
    return model


def _operation(layer: Any, decision: Decision, default: ScalingChoice | None) -> tuple[str, Fp8Op]:
    """Return the attribute of a layer's operation, and its FP8 operation."""
    base = next(base for base in LAYERS if isinstance(layer, base))
    attribute, kind, kernel_of = LAYERS[base]
    name = decision.fqn or type(layer).__name__
    if isinstance(getattr(layer, attribute), Fp8Op):
        raise Fp8Error(f"The layer {name!r} is in FP8 already. Convert a model once.")
    if not _calls(type(layer), base, attribute):
        raise Fp8Error(
            f"The layer {name!r} is a {type(layer).__name__} with a custom __call__, which uses neither "
            f"self.{attribute} nor super(): it would not run in FP8. Leave it out with the rule '!{name}', or make it "
            f"multiply with self.{attribute}."
        )
    kernel_shape, shape = tuple(kernel_of(layer)), layer.kernel.shape
    stacked = shape[: len(shape) - len(kernel_shape)]
    if (*stacked, *kernel_shape) != shape:
        raise Fp8Error(
            f"The kernel of {name!r} has shape {shape}, and one layer's kernel has {kernel_shape}. Stack layers along "
            "leading dimensions (out_axes=0 of nnx.vmap), or convert the layers before you stack them."
        )
    return attribute, kind(decision.recipe or default, stacked)


def _calls(kind: type, base: type, attribute: str) -> bool:
    """Return whether the `__call__` of a layer reaches its operation.

    Only the names in its code are inspected. An operation that another method of the class calls is not found, and the
    conversion raises.

    Args:
        kind: Class of the layer.
        base: Class of flax that it derives from.
        attribute: Attribute of the operation.
    """
    code = getattr(inspect.unwrap(kind.__call__), "__code__", None)
    if kind.__call__ is base.__call__ or code is None:
        return True
    return attribute in code.co_names or "super" in code.co_names or base.__name__ in code.co_names
