"""Rows of two models that must train alike.

A row says which two: mostly one whose weights are gathered in FP8 and one whose weights are gathered in high precision.
What is compared: all losses, the gradients of the last step, weights, delayed scales and their histories.
"""

import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

import fp8_torch_fsdp as f8
from fsdp_models import RECIPES, blocks, converted, seeded, shard
from fsdp_training import train, unlike, whole


class Row(NamedTuple):
    """Two models that must train alike.

    Attributes:
        models: Returns both, on each rank, by the recipe.
        ranks: How many ranks.
        recipes: Those of default runs.
        casts: Weights that the first one casts in a step; None if that says nothing.
        reductions: MAX all-reduces of the first one in a step; a number, or a function of the recipe.
        loop: Options of `train`.
        first: Options of `train` for the first model alone.
        more: The recipes that full runs add.
    """

    models: Callable[[Any], Sequence[Any]]
    ranks: int = 2
    recipes: Sequence[Any] = ("tensorwise", "tensorwise_delayed")
    casts: int | None = 4
    reductions: Any = 1
    loop: Mapping[str, Any] = types.MappingProxyType({})
    first: Mapping[str, Any] = types.MappingProxyType({})
    more: Sequence[Any] = RECIPES


STEPS = 3


def both_gathers(
    make: Callable[[], nn.Module] = blocks, place: Callable[..., Any] = shard, **options: Any
) -> Callable[[Any], list[Any]]:
    """Return what makes a model with FP8 gathers, and the same one with high-precision gathers."""

    def models(recipe: Any) -> list[Any]:
        return [place(converted(seeded(make), recipe, gather=gather, **options)) for gather in (True, False)]

    return models


def check(rank: int, row: Row, recipe: Any) -> None:
    """Train the models of a row on each rank, and compare them."""
    models, loop = row.models(recipe), {"steps": STEPS, **row.loop}
    losses = [train(model, rank, **loop, **extra) for model, extra in zip(models, (row.first, {}), strict=True)]
    report = f8.float8_report(models[0])
    low, high = (whole(m) | {"losses": torch.tensor(own)} for m, own in zip(models, losses, strict=True))
    assert unlike(low, high) == [], recipe
    assert low["losses"].isfinite().all(), recipe
    assert any(value.any() for name, value in low.items() if name.endswith(".grad")), f"{recipe}: it learns"
    reductions = row.reductions(recipe) if callable(row.reductions) else row.reductions
    assert row.casts in (None, report.casts / loop["steps"]), f"{recipe}: {report.casts}"
    assert reductions in (None, report.reductions / loop["steps"]), f"{recipe}: {report.reductions}"


def check_all(rank: int, row: Row, full: bool) -> None:
    """Check a row under its recipes, in full runs under more."""
    for recipe in dict.fromkeys((*row.recipes, *(row.more if full else ()))):
        check(rank, row, recipe)
