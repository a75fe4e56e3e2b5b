"""`weights_unchanged`: a window that the user declares, in which weights are cast once and numbers stay the same."""

import contextlib

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import fp8_torch_fsdp as f8
from fp8_common import Fp8Error, Fp8StaleError
from fp8_torch_fsdp.scales.sync import sync_of
from fp8_torch_fsdp.scales.weight import Fp8Weight
from fsdp_models import converted, mesh_of, seeded, shard
from fsdp_training import adamw, batch
from tests.helpers.ranks import on_ranks
from tests.helpers.sharded_models import loss_of

RECIPES = ["tensorwise", "tensorwise_delayed", "rowwise", "rowwise_with_gw_hp", "blockwise"]
MICROS = 4


def two_layers():
    return nn.Sequential(nn.Linear(24, 32, bias=False), nn.GELU(), nn.Linear(32, 8))


class Recomputed(nn.Sequential):
    """Layers whose activations the backward computes again."""

    def forward(self, x):
        for layer in self:
            x = checkpoint(layer, x, use_reentrant=False)
        return x


def train(model, rank=0, *, window, steps=2):
    """Return the losses and the state after steps of several micro-batches."""
    optimizer, losses = adamw(model.parameters()), []
    for step in range(steps):
        with f8.weights_unchanged(model) if window else contextlib.nullcontext():
            for micro in range(MICROS):
                loss = loss_of(model, batch(rank, MICROS * step + micro, (8, 24)))
                loss.backward()
                losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, [p.full_tensor() if hasattr(p, "full_tensor") else p.detach() for p in model.parameters()]


def same(a, b):
    return a[0] == b[0] and all(torch.equal(x, y) for x, y in zip(a[1], b[1], strict=True))


@pytest.mark.parametrize("recomputed", [False, True])
@pytest.mark.parametrize("recipe", RECIPES)
@on_ranks(2)
def test_shards_are_cast_and_agreed_on_once(rank, recipe, recomputed):
    found = {}
    for window in (False, True):
        model = converted(seeded(two_layers), recipe)
        if recomputed:
            model.__class__ = Recomputed
        shard(model, mesh_of(2))
        trained = train(model, rank, window=window)
        report = f8.float8_report(model)
        found[window] = trained, report.casts, report.reductions
    (plain, casts, reductions), (held, fewer, less) = found[False], found[True]
    assert same(plain, held)
    weights = len(sync_of(model).weights)
    assert (casts, fewer) == (2 * MICROS * weights, 2 * weights)
    # delayed scales of activations are combined in every forward
    assert less == (reductions if "delayed" in recipe else reductions // MICROS)


@pytest.mark.parametrize("recipe", RECIPES)
def test_weights_that_no_rank_gathers_are_cast_once(recipe, monkeypatch):
    counts, whole = [], Fp8Weight.whole
    monkeypatch.setattr(
        Fp8Weight, "whole", lambda self, *args, **options: counts.append(1) or whole(self, *args, **options)
    )
    found = {}
    for window in (False, True):
        model = converted(seeded(two_layers), recipe)
        counts.clear()
        found[window] = train(model, window=window), len(counts)
        assert all(matmul.weight.held_codes is None for layer in (model[0], model[2]) for matmul in layer.fp8.values())
    assert same(found[False][0], found[True][0])
    assert (found[False][1], found[True][1]) == (2 * 2 * MICROS, 2 * 2)


def test_a_write_that_torch_counts_is_computed_with_where_nothing_is_gathered():
    low, wanted = (converted(seeded(two_layers), "tensorwise") for _ in range(2))
    with f8.weights_unchanged(low):
        low(batch(0, 0, (8, 24)))
        for model in (low, wanted):
            with torch.no_grad():
                model[0].weight.mul_(3)
        assert torch.equal(low(batch(0, 0, (8, 24))), wanted(batch(0, 0, (8, 24))))
        low[2].weight = nn.Parameter(torch.zeros_like(low[2].weight))
        assert torch.equal(low(batch(0, 0, (8, 24))), low[2].bias.expand(8, 8))


def changed(model, how):
    with torch.no_grad():
        if how == "mul_":
            model[0].weight.mul_(3)
        elif how == "an assigning load":
            model.load_state_dict({name: 2 * value for name, value in model.state_dict().items()}, assign=True)
        else:
            adamw(model.parameters()).step()


@pytest.mark.parametrize("how", ["mul_", "an assigning load", "a step"])
@on_ranks(2)
def test_a_change_of_shards_raises_on_all_ranks(rank, how):
    model = converted(seeded(two_layers), "tensorwise")
    shard(model, mesh_of(2))
    x = batch(rank, 0, (8, 24))
    error = Fp8Error if how == "a step" else Fp8StaleError
    before = model[0].weight.full_tensor().clone()

    def inside():
        with f8.weights_unchanged(model):
            loss_of(model, x).backward()
            changed(model, how)
            model(x)

    with pytest.raises(error, match="weights_unchanged"):
        inside()
    if how == "a step":
        assert torch.equal(model[0].weight.full_tensor(), before), "it raises before it changes anything"
        changed(model, how)  # outside it steps
    wanted = converted(nn.Sequential(nn.Linear(24, 32, bias=False), nn.GELU(), nn.Linear(32, 8)), "tensorwise")
    wanted.load_state_dict({name: value.full_tensor() for name, value in model.state_dict().items()})
    assert torch.equal(model(x), wanted(x)), "after the window weights are cast again"


def test_windows_nest_and_a_step_of_another_model_passes():
    model, other = (converted(seeded(two_layers), "tensorwise") for _ in range(2))
    optimizer = adamw(other.parameters())
    with f8.weights_unchanged(model):
        with f8.weights_unchanged(model[0]):
            loss_of(other, batch(0, 0, (8, 24))).backward()
        assert model[0].fp8["weight"].weight.declared_unchanged
        optimizer.step()
    assert not model[0].fp8["weight"].weight.declared_unchanged
