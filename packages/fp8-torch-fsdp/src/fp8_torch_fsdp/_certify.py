"""Rows of `fp8 certify` for torch: recipes of this project, bfloat16 and torchao."""

import dataclasses
import functools
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from fp8_common import RECIPES, CastRecipe, Recipe, ScalePolicy
from fp8_common.presets import te_current
from fp8_common.testing.certify import Certificate, Property, ask, casts_of, example
from fp8_common.torch.certify import RATE, ranks, subject, train
from fp8_torch_fsdp.convert.model import convert_to_float8_training
from fp8_torch_fsdp.scales.checkpoint import DelayedState
from fp8_torch_fsdp.scales.sync import synchronize_scales

INPUTS, WEIGHTS = example()
_ROW = CastRecipe(granularity="rowwise", policy=ScalePolicy(name="stable", power_of_2=True, stable=True))
_STATIC = CastRecipe(scaling="static", static_scale=16.0)
CONVERTED = {
    # MX blocks the weight gradient over 32 tokens, and the example has fewer.
    **{name: recipe for name, recipe in RECIPES.items() if name != "mxfp8"},
    "rowwise, stable scales": Recipe(name="stable", input=_ROW, weight=_ROW, grad_output=_ROW),
    "static": Recipe(
        name="static",
        input=_STATIC,
        weight=_STATIC,
        grad_output=dataclasses.replace(_STATIC, format="e5m2"),
    ),
}
_BY_ROWS = te_current(pow2=True, eps=1e-12)
TORCHAO = {"tensorwise": te_current(eps=1e-12), "rowwise": _BY_ROWS, "rowwise_with_gw_hp": _BY_ROWS}
"""Scale rules of torchao's recipes for finite tensors: amax is at least 1e-12."""


def model() -> nn.Sequential:
    """Return the unconverted model of the example, two linear layers."""
    layers = nn.Sequential()
    for name, weight in WEIGHTS.items():
        layers.add_module(name, layer := nn.Linear(*weight.T.shape, bias=False))
        layer.weight.data.copy_(torch.from_numpy(weight))
        if name == "up":
            layers.add_module("relu", nn.ReLU())
    return layers


def built(name: str) -> nn.Module:
    """Return the model of a row.

    A model with delayed scaling is trained for two steps, which fill its histories.
    """
    if name == "bf16":
        return model().bfloat16()
    if name.startswith("torchao "):
        # imported by name: torchao is not a dependency of this package
        float8: Any = importlib.import_module("torchao.float8")
        config = float8.Float8LinearConfig.from_recipe_name(name.removeprefix("torchao "))
        return float8.convert_to_float8_training(model(), config=dataclasses.replace(config, emulate=True))
    converted = convert_to_float8_training(model(), recipe=CONVERTED[name])
    if CONVERTED[name].input.scaling == "delayed":
        optimizer = torch.optim.SGD(converted.parameters(), lr=RATE)
        for _ in range(2):
            train(converted, torch.from_numpy(INPUTS), optimizer)
        synchronize_scales(converted)
    return converted


def certificates(properties: Sequence[Property]) -> Iterator[tuple[str, Callable[[], Certificate]]]:
    """Yield each row's name and a function that returns its certificate."""
    peers = [f"torchao {name}" for name in TORCHAO] if importlib.util.find_spec("torchao") else []
    with ranks() as pool:
        for name in ["bf16", *CONVERTED, *peers]:
            yield name, functools.partial(_certificate, name, properties, pool)


def _certificate(name: str, properties: Sequence[Property], pool: Any) -> Certificate:
    casts = None
    if name.startswith("torchao "):
        rule = TORCHAO[name.removeprefix("torchao ")]
        rows = CastRecipe(granularity="rowwise" if "rowwise" in name else "tensorwise", policy=rule)
        casts = casts_of(Recipe(name=name, input=rows, weight=rows, grad_output=rows))
    dtype = torch.bfloat16 if name == "bf16" else torch.float32
    certified = subject(
        built(name),
        torch.from_numpy(INPUTS).to(dtype),
        build=functools.partial(built, name),
        casts=casts,
        state=lambda each: {"model": each, "scales": DelayedState(each)},
        pool=pool,
    )
    return ask(certified, properties)
