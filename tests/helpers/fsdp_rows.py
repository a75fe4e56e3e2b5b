"""Rows of two models that must train alike.

A row says which two: mostly one whose weights are gathered in FP8 and one whose weights are gathered in high precision.
What is compared: all losses, the gradients of the last step, weights, delayed scales and their histories.
"""

import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

import fp8_torch_fsdp as f8
from tests.helpers.fsdp_models import RECIPES, blocks, converted, seeded, shard
from tests.helpers.fsdp_training import train, unlike, whole


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
    """

    models: Callable[[Any], Sequence[Any]]
    ranks: int = 2
    recipes: Sequence[Any] = ("tensorwise", "tensorwise_delayed")
    casts: int | None = 4
    reductions: Any = 1
    loop: Mapping[str, Any] = types.MappingProxyType({})
    first: Mapping[str, Any] = types.MappingProxyType({})


class Compared(NamedTuple):
    """What became of a row: what differs; the first one's losses, whether it has gradients, what it did in a step."""

    different: list[str]
    losses: list[float]
    learns: bool
    casts: float
    reductions: float


STEPS = 3


def both_gathers(
    make: Callable[[], nn.Module] = blocks, place: Callable[..., Any] = shard, **options: Any
) -> Callable[[Any], list[Any]]:
    """Return what makes a model with FP8 gathers, and the same one with high-precision gathers."""

    def models(recipe: Any) -> list[Any]:
        return [place(converted(seeded(make), recipe, gather=gather, **options)) for gather in (True, False)]

    return models


def compared(rank: int, row: Row, recipe: Any) -> Compared:
    """Train the models of a row."""
    models, loop = row.models(recipe), {"steps": STEPS, **row.loop}
    losses = [train(model, rank, **loop, **extra) for model, extra in zip(models, (row.first, {}), strict=True)]
    report = f8.float8_report(models[0])
    states = [whole(m) | {"losses": torch.tensor(own)} for m, own in zip(models, losses, strict=True)]
    learns = bool(states[0]["losses"].isfinite().all()) and any(
        bool(value.any()) for name, value in states[0].items() if name.endswith(".grad")
    )
    counts = report.casts / loop["steps"], report.reductions / loop["steps"]
    return Compared(unlike(*states), losses[0], learns, *counts)


def check(row: Row, recipe: Any, found: Iterable[Compared]) -> None:
    """Check what `compared` returned on each rank."""
    for one in found:
        assert one.different == [], f"{recipe}: {one}"
        assert one.learns, f"{recipe}: {one}"
        assert row.casts in (None, one.casts), f"{recipe}: {one}"
        reductions = row.reductions(recipe) if callable(row.reductions) else row.reductions
        assert reductions in (None, one.reductions), f"{recipe}: {one}"


def run_row(rank: int, ranks: int, row: Row, recipes: Sequence[Any]) -> list[Compared]:
    """Train a row's models under some recipes; `ranks` is that of `run_ranks`."""
    return [compared(rank, row, recipe) for recipe in recipes]


def check_row(
    run_ranks: Callable[..., list[Any]], function: Callable[..., Any], name: str, row: Row, full: bool
) -> None:
    """Run `function(rank, ranks, name, recipes)`, which calls `run_row`, on all ranks, and check all recipes."""
    recipes = [*row.recipes, *(r for r in RECIPES if full and row.recipes != () and r not in row.recipes)]
    results = run_ranks(row.ranks, function, name, recipes)
    for recipe, *found in zip(recipes, *results, strict=True):
        check(row, recipe, found)
