"""Decides which layers of an NNX model become FP8 layers: those that the rules include, in place."""

import logging
from collections.abc import Iterable, Iterator
from typing import TypeVar

from flax import nnx

from fp8_common import Decision, Fp8Error, Recipe, Rule, Rules
from fp8_jax_owg._scaling import CurrentScaling, DelayedScaling, Scaling
from fp8_jax_owg.nnx._operations import Fp8ConvGeneralDilatedOp, Fp8DotGeneralOp, Fp8EinsumOp, Fp8Op

logger = logging.getLogger(__name__)

Model = TypeVar("Model", bound=nnx.Module)

# Where each kind of layer keeps the function that multiplies.
OPERATIONS: tuple[tuple[type[nnx.Module], str, type[Fp8Op]], ...] = (
    (nnx.Linear, "dot_general", Fp8DotGeneralOp),
    (nnx.LinearGeneral, "dot_general", Fp8DotGeneralOp),
    (nnx.Einsum, "einsum_op", Fp8EinsumOp),
    (nnx.Conv, "conv_general_dilated", Fp8ConvGeneralDilatedOp),
)


def convert_to_fp8(model: Model, rules: Rules | Iterable[str | Rule] = (), scaling: Scaling | None = None) -> Model:
    """Give the layers of a model FP8 products, in place. Call it before `nnx.split`, `nnx.jit` and the optimizer.

    Converted are `nnx.Linear`, `nnx.LinearGeneral` (and so attention), `nnx.Einsum` and `nnx.Conv`; parameters keep
    their places and values. State of type `OverwriteWithGradient` is added beside them.

    Args:
        model: The model, or a single layer.
        rules: Which layers, by their dotted names (`blocks.0.mlp.up`), as `fp8_common._rules` describes; all by
            default. A rule may name a recipe: `tensorwise` is `CurrentScaling()`, `tensorwise_delayed` is
            `DelayedScaling` with its history length.
        scaling: For rules that name no recipe; None is `DelayedScaling()`.

    Returns:
        The model.

    Raises:
        Fp8Error: No layer is converted, a rule decides nothing, a recipe is not one of the two, or a layer has a
            product of its own.
    """
    layers = dict(find_layers(model))
    decisions = Rules.parse(rules).apply(layers)
    chosen = [decision for decision in decisions if decision.include]
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


def scaling_of(recipe: Recipe | None, default: Scaling | None) -> Scaling:
    """Return the scaling that a recipe stands for.

    Raises:
        Fp8Error: The recipe needs more than one scale per tensor.
    """
    if recipe is None:
        return default or DelayedScaling()
    if recipe.name == "tensorwise":
        return CurrentScaling()
    if recipe.name == "tensorwise_delayed":
        return DelayedScaling(amax_history_length=recipe.input.policy.history)
    raise Fp8Error(
        f"Layers of fp8_jax_owg know the recipes tensorwise and tensorwise_delayed, got {recipe.name!r}. "
        'For a scale per row pass scaling=CurrentScaling(granularity="row").'
    )


def _operation(layer: nnx.Module, decision: Decision, default: Scaling | None) -> tuple[str, Fp8Op]:
    """Return where a layer keeps its product, and the FP8 product."""
    attribute, kind = next((name, op) for layers, name, op in OPERATIONS if isinstance(layer, layers))
    if isinstance(getattr(layer, attribute), Fp8Op):
        raise Fp8Error(f"The layer {decision.fqn or type(layer).__name__!r} is in FP8 already. Convert a model once.")
    return attribute, kind(scaling_of(decision.recipe, default))
