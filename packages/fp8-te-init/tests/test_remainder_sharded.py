"""Several ranks: masters in three bytes train, save and reshard as whole ones do, bit for bit."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import fp8_te_init as fti
from fp8_te_init._master_optimizer import MASTER
from fp8_te_init._masters import remainder
from tests.helpers.sharded_models import mlp, shard, train

pytestmark = pytest.mark.distributed

RECIPES = ["tensorwise", "tensorwise_delayed", "rowwise", "blockwise"]
KEPT = ["remainder", "float32"]


def built(world_size, recipe, kept, preserve="cpu", moments="float32"):
    remainder.PART, remainder.COMPILED_PARTS = 256, 1  # several parts on each rank
    torch.manual_seed(0 if preserve == "cpu" else 99)
    model = shard(fti.convert_linear(mlp(), recipe=recipe, preserve=preserve), world_size)
    optimizer = fti.MasterOptimizer(torch.optim.AdamW, model.parameters(), lr=1e-2, masters=kept, moments=moments)
    if preserve == "cpu":
        fti.seed_masters(optimizer, model)
    return model, optimizer


def bits_of(model, optimizer) -> list[torch.Tensor]:
    """Codes, scales, masters and moments of the whole model."""
    bits = []
    for layer in model:
        state = optimizer.state[layer.weight]
        values = [
            optimizer.master_of(layer.weight),
            *(v for name, v in sorted(state.items()) if name != MASTER and v.ndim),
        ]
        bits += [value.full_tensor().clone() for value in values]
        parts = [None] * dist.get_world_size()
        dist.all_gather_object(parts, layer.weight.to_local().state.own_codes)
        bits += [torch.cat(parts), layer.weight.to_local().state.scale.clone()]
    return bits


def trained(rank, world_size, recipe):
    runs = []
    for kept in KEPT:
        model, optimizer = built(world_size, recipe, kept)
        runs.append((train(model, optimizer, rank, 10), bits_of(model, optimizer), optimizer.reductions))
    same = all(torch.equal(a, b) for a, b in zip(runs[0][1], runs[1][1], strict=True))
    return runs[0][0] == runs[1][0], same, runs[0][2] == runs[1][2]


@pytest.mark.matrix("each", world_size=[2, 3, 4], recipe=RECIPES)
def test_training_is_that_of_whole_masters(run_ranks, world_size, recipe):
    assert set(run_ranks(world_size, trained, recipe)) == {(True, True, True)}


def save(rank, world_size, folder, recipe, kept, moments="float32"):
    model, optimizer = built(world_size, recipe, kept, moments=moments)
    train(model, optimizer, rank, 3)
    state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.save(state, checkpoint_id=folder)
    return bits_of(model, optimizer)


def load(rank, world_size, folder, recipe, kept, moments="float32"):
    model, optimizer = built(world_size, recipe, kept, preserve="none", moments=moments)
    state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    bits = bits_of(model, optimizer)
    train(model, optimizer, rank, 2)
    if kept == "remainder":
        masters, listed = optimizer.master_bytes()
        assert masters == 3 * sum(layer.weight.to_local().numel() for layer in model) + 8 * listed
    return bits


@pytest.mark.matrix("each", save_with=[4, 3, 1], load_with=[3, 1, 2], recipe=RECIPES, kept=KEPT, again=KEPT)
def test_checkpoints_reshard_and_go_both_ways(run_ranks, tmp_path, save_with, load_with, recipe, kept, again):
    saved = run_ranks(save_with, save, str(tmp_path), recipe, kept)
    loaded = run_ranks(load_with, load, str(tmp_path), recipe, again)
    for bits in [*saved, *loaded]:
        assert all(torch.equal(a, b) for a, b in zip(bits, saved[0], strict=True))


def load_and_save(rank, world_size, folder, target, recipe):
    model, optimizer = built(world_size, recipe, "remainder", preserve="none", moments="fp8")
    for action, where in ((dcp.load, folder), (dcp.save, target)):
        state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
        action(state, checkpoint_id=where)
        if action is dcp.load:
            set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    return bits_of(model, optimizer)


@pytest.mark.matrix("each", recipe=["tensorwise", "blockwise"])
def test_fp8_moments_reshard_from_four_ranks_to_three_to_one(run_ranks, tmp_path, recipe):
    saved = run_ranks(4, save, str(tmp_path / "4"), recipe, "remainder", "fp8")
    at_three = run_ranks(3, load_and_save, str(tmp_path / "4"), str(tmp_path / "3"), recipe)
    at_one = run_ranks(1, load, str(tmp_path / "3"), recipe, "remainder", "fp8")
    for bits in [*saved, *at_three, *at_one]:
        assert sum(value.dtype == torch.uint8 for value in bits) == 5 * 4, "codes of weights, moments and exponents"
        assert all(torch.equal(a, b) for a, b in zip(bits, saved[0], strict=True))
