"""`convert_to_fp8`: the layers of an NNX model that the rules include get FP8 products, in place."""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TypeVar

from flax import nnx

from fp8_common import Decision, Fp8Error, Rule, Rules
from fp8_jax_owg._recipes import ScalingChoice
from fp8_jax_owg.nnx._operations import Fp8ConvGeneralDilatedOp, Fp8DotGeneralOp, Fp8EinsumOp, Fp8Op

logger = logging.getLogger(__name__)

Model = TypeVar("Model", bound=nnx.Module)
RulesOrFilter = Rules | Iterable[str | Rule] | Callable[[nnx.Module, str], bool]

# Where each kind of layer keeps the function that multiplies.
OPERATIONS: tuple[tuple[type[nnx.Module], str, type[Fp8Op]], ...] = (
    (nnx.Linear, "dot_general", Fp8DotGeneralOp),
    (nnx.LinearGeneral, "dot_general", Fp8DotGeneralOp),
    (nnx.Einsum, "einsum_op", Fp8EinsumOp),
    (nnx.Conv, "conv_general_dilated", Fp8ConvGeneralDilatedOp),
)


def convert_to_fp8(model: Model, rules: RulesOrFilter = (), scaling: ScalingChoice | None = None) -> Model:
    """Give the layers of a model FP8 products, in place. Call it before `nnx.split`, `nnx.jit` and the optimizer.

    Converted are `nnx.Linear`, `nnx.LinearGeneral` (and so attention), `nnx.Einsum` and `nnx.Conv`; parameters keep
    their places and values. State of type `OverwriteWithGradient` is added beside them.

    Args:
        model: The model, or a single layer.
        rules: Which layers, by their dotted names (`blocks.0.mlp.up`), as `fp8_common.Rules` describes; all by
            default. A rule may name a recipe. Or a function `(layer, name) -> bool`, as peers' `module_filter_fn`.
        scaling: For rules that name no recipe: `DelayedScaling`, `CurrentScaling`, or a recipe of `fp8_common`; None
            is `DelayedScaling()`.

    Returns:
        The model.

    Raises:
        Fp8Error: No layer is converted, a rule decides nothing, a recipe cannot be honoured, or a layer has a
            product of its own.
    """
    layers = dict(find_layers(model))
    chosen = [decision for decision in _decisions(layers, rules) if decision.include]
    if not chosen:
        raise Fp8Error(
            f"No layer to convert among {len(layers)} ({', '.join(list(layers)[:3]) or 'none found'}). "
            "Check the rules and the model."
        )
    # all are made before one is put in place: a refusal leaves the model as it was
    made = [(layers[decision.fqn], *_operation(layers[decision.fqn], decision, scaling)) for decision in chosen]
    for layer, attribute, operation in made:
        # NNX holds functions as static attributes; a module is data
        setattr(layer, attribute, nnx.data(operation))
    logger.info("FP8: converted %d of %d layers.", len(chosen), len(layers))
    return model


def find_layers(model: nnx.Module) -> Iterator[tuple[str, nnx.Module]]:
    """Yield the dotted name of every layer that can be converted, and the layer; a shared one once."""
    for path, module in nnx.iter_modules(model):
        if isinstance(module, tuple(kind for kind, _, _ in OPERATIONS)):
            yield ".".join(map(str, path)), module


def _decisions(layers: Mapping[str, nnx.Module], rules: RulesOrFilter) -> list[Decision]:
    if callable(rules):
        return [Decision(fqn=name, include=bool(rules(layer, name))) for name, layer in layers.items()]
    return Rules.parse(rules).apply(layers)


def _operation(layer: nnx.Module, decision: Decision, default: ScalingChoice | None) -> tuple[str, Fp8Op]:
    """Return where a layer keeps its product, and the FP8 product."""
    attribute, kind = next((name, op) for layers, name, op in OPERATIONS if isinstance(layer, layers))
    if isinstance(getattr(layer, attribute), Fp8Op):
        raise Fp8Error(f"The layer {decision.fqn or type(layer).__name__!r} is in FP8 already. Convert a model once.")
    return attribute, kind(decision.recipe or default)
