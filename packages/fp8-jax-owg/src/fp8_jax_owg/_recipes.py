"""Recipes of `fp8_common` as the scaling of a JAX product: `as_scaling`, and `recipe_of` for the way back."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from fp8_common import CastRecipe, Fp8Error, Recipe, get_recipe
from fp8_jax_owg._scaling import (
    FORMATS,
    CurrentScaling,
    DelayedScaling,
    Granularity,
    Scaling,
    format_of,
)

ScalingChoice = Scaling | Recipe | str | Mapping[str, Any]
"""What every `scaling` argument takes: a scaling, a recipe, its name, or a recipe as `Recipe.to_dict` writes it."""
GRANULARITIES: dict[str, Granularity] = {"tensorwise": "tensor", "rowwise": "row"}
OPERANDS: dict[Literal["output", "grad_input", "grad_weight"], tuple[str, str]] = {
    "output": ("input", "weight"),
    "grad_input": ("grad_output", "weight"),
    "grad_weight": ("input", "grad_output"),
}
"""The operands of the three products of a layer, as `Recipe.operands` returns them."""
SETTINGS = {(forward.name, gradient.name): setting for setting, (forward, gradient) in FORMATS.items()}
"""The setting for a format forward and one of gradients."""


def as_scaling(choice: ScalingChoice) -> Scaling:
    """Return the scaling that a recipe stands for; a scaling is returned as it is.

    Raises:
        Fp8Error: No recipe has this name, the dictionary describes none, or the layers of this package cannot honour
            one of its fields; the message names the field.
    """
    if isinstance(choice, DelayedScaling | CurrentScaling):
        return choice
    if not isinstance(choice, Recipe | str | Mapping):
        raise Fp8Error(
            "scaling must be a DelayedScaling, a CurrentScaling, a Recipe, the name of a recipe or its dictionary, "
            f"got {choice!r}."
        )
    recipe = Recipe.from_dict(choice) if isinstance(choice, Mapping) else get_recipe(choice)
    scaling = _nearest(recipe)
    if differing := list(_differences(recipe, recipe_of(scaling))):
        product, operand, field, wanted, had = differing[0]
        raise Fp8Error(
            f"Layers of fp8_jax_owg cannot honour recipe {recipe.name!r}: in the product {product!r} its {operand} has "
            f"{field}={wanted!r}, where they would have {had!r}. They take one delayed or dynamic scaling for all "
            "operands, tensorwise, or rowwise with dynamic scaling: take the recipe tensorwise, tensorwise_delayed or "
            "rowwise, or change that field."
        )
    return scaling


def recipe_of(scaling: Scaling) -> Recipe:
    """Return the recipe that a scaling stands for."""
    by_row = isinstance(scaling, CurrentScaling) and scaling.granularity == "row"
    casts = {
        operand: CastRecipe(
            format=format_of(tensor, scaling).name,
            scaling="delayed" if isinstance(scaling, DelayedScaling) else "dynamic",
            granularity="rowwise" if by_row else "tensorwise",
            policy=scaling.policy,
        )
        for operand, tensor in (("input", "input"), ("weight", "kernel"), ("grad_output", "output_grad"))
    }
    return Recipe(name=type(scaling).__name__, **casts)


def _nearest(recipe: Recipe) -> Scaling:
    """Return the scaling that has what a recipe says of its input; what it says of the rest may differ."""
    cast, policy = recipe.input, recipe.input.policy
    fp8_format = SETTINGS.get((cast.format, recipe.grad_output.format), "HYBRID")
    if cast.scaling == "delayed":
        return DelayedScaling(
            amax_history_length=policy.history,
            margin=policy.margin,
            amax_compute_algo=policy.algo,
            fp8_format=fp8_format,
        )
    granularity = GRANULARITIES.get(cast.granularity, "tensor")
    return CurrentScaling(granularity=granularity, fp8_format=fp8_format, power_of_2=policy.power_of_2)


def _differences(recipe: Recipe, honoured: Recipe) -> Iterator[tuple[str, str, str, Any, Any]]:
    """Yield product, operand, field, and both values wherever a cast of a recipe differs from what layers do."""
    for product, names in OPERANDS.items():
        casts = zip(names, recipe.operands(product), honoured.operands(product), strict=True)
        for name, wanted, had in casts:
            for field, value, other in _fields(wanted, had):
                yield product, name, field, value, other


def _fields(wanted: CastRecipe, had: CastRecipe) -> Iterator[tuple[str, Any, Any]]:
    for field in dataclasses.fields(CastRecipe):
        value, other = getattr(wanted, field.name), getattr(had, field.name)
        if field.name != "policy":
            pairs = [(field.name, value, other)]
        else:
            # the name of a policy changes no number
            pairs = [
                (f"policy.{part.name}", getattr(value, part.name), getattr(other, part.name))
                for part in dataclasses.fields(value)
                if part.name != "name"
            ]
        yield from (pair for pair in pairs if pair[1] != pair[2])
