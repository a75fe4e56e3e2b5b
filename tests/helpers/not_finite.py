"""Infinity and NaN in an operand, and training in float16 with a `GradScaler`, compared with plain PyTorch."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from fp8_common import RECIPES, CastRecipe, Recipe
from tests.helpers.sharded_models import batches

STATIC = Recipe(
    name="static",
    input=CastRecipe(scaling="static", static_scale=24.0),
    weight=CastRecipe(scaling="static", static_scale=256.0),
    # gradients of a scaled loss reach the largest float16, which E5M2 nearly holds without a scale
    grad_output=CastRecipe(format="e5m2", scaling="static", static_scale=1.0),
)
NAMES = ("tensorwise", "tensorwise_delayed", "rowwise", "rowwise_with_gw_hp", "blockwise", "static")
PLACES = ("input", "weight", "grad_output")
BAD = (float("inf"), float("-inf"), float("nan"))
every_case = pytest.mark.matrix(name=NAMES, place=PLACES, bad=BAD, dtype=(torch.float32, torch.float16, torch.bfloat16))


def recipe_named(name: str) -> Recipe:
    return STATIC if name == "static" else RECIPES[name]


# ---------------------------------------------------------------- one bad value


def plain_layers(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """Layers without a bias, whose gradient would show an infinity that a product hides."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(24, 40, bias=False), nn.GELU(), nn.Linear(40, 16, bias=False)).to(dtype)


def run(model: nn.Module, step: int, place: str = "", bad: float = 0.0) -> tuple[torch.Tensor, ...]:
    """Return output, gradient of the input and gradients of the weights of one batch, with a bad value in `place`."""
    generator, dtype = torch.Generator().manual_seed(step), model[0].weight.dtype
    x = torch.randn(8, 24, generator=generator).to(dtype)
    upstream = torch.randn(8, 16, generator=generator).to(dtype)
    model.zero_grad()
    if place == "input":
        x[1, 2] = bad
    if place == "grad_output":
        upstream[2, 5] = bad
    if place == "weight":
        with torch.no_grad():
            kept = model[-1].weight[3, 4].item()
            model[-1].weight[3, 4] = bad
    y = model(x.requires_grad_())
    y.backward(upstream)
    found = y.detach(), x.grad, *(p.grad for p in model.parameters())
    if place == "weight":
        with torch.no_grad():
            model[-1].weight[3, 4] = kept
    return found


def assert_as_visible_as_without_fp8(low: nn.Module, place: str, bad: float, dtype: torch.dtype) -> None:
    """What is not finite beside plain PyTorch is not finite here, and nothing else is."""
    for found, wanted in zip(run(low, 0, place, bad), run(plain_layers(dtype), 0, place, bad), strict=True):
        assert torch.equal(found.isfinite(), wanted.isfinite())


def assert_recovers(build: Callable[[], tuple[nn.Module, torch.optim.Optimizer]], place: str, bad: float) -> None:
    """Two steps, one that meets `bad` and is skipped, two more: all bits are those of the run that never met it."""
    runs = []
    for events in ([(0, ""), (1, ""), (2, place), (2, ""), (3, "")], [(0, ""), (1, ""), (2, ""), (3, "")]):
        (model, optimizer), seen = build(), []
        for step, here in events:
            if place == "weight" and (step, here) == (2, ""):
                touch(model)
            found = run(model, step, here, bad)
            if not here:
                optimizer.step()
                seen.append(found)
            else:
                assert not all(one.isfinite().all() for one in found)
        runs.append((seen, {name: torch.as_tensor(value).clone() for name, value in model.state_dict().items()}))
    (seen, state), (seen_clean, state_clean) = runs
    for ours, clean in zip(seen, seen_clean, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, clean, strict=True))
    assert all(torch.equal(state[name], value) for name, value in state_clean.items())


def touch(model: nn.Module) -> None:
    """Write the weight that is there already: an edit by hand starts its history anew, whatever its values."""
    with torch.no_grad():
        model[-1].weight[3, 4] = model[-1].weight[3, 4].item()


# ---------------------------------------------------------------- float16 and a loss that is scaled

STEPS = 20
# Scaled gradients of the output begin near 2^8.2 times the largest float16, far from where rounding to FP8 would decide
# whether a step overflows.
FACTOR = 2.0**7.1


def scaled_layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(24, 40, bias=False), nn.GELU(), nn.Linear(40, 24, bias=False))


def train_with_scaler(
    model: nn.Module, optimizer: torch.optim.Optimizer, rank: int = 0
) -> tuple[list[int], list[float]]:
    """Train under float16 autocast with the default `GradScaler`; return the skipped steps and all losses."""
    scaler, skipped, losses = torch.amp.GradScaler("cpu"), [], []
    for step, x in enumerate(batches(rank, STEPS)):
        with torch.autocast("cpu", torch.float16):
            # small inputs: plain PyTorch has gradients of weights in float16, too, and they shall not overflow first
            y = model((x + 2) / 32)
        loss = FACTOR * (y.float() - 1).square().sum()
        scaler.scale(loss).backward()
        before = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.item())
        if scaler.get_scale() < before:
            skipped.append(step)
    return skipped, losses
