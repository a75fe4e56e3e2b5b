"""Checkpoints are plain, lose no bit whatever reads them, and are whole or refused."""

import itertools

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

import fp8_torch_fsdp as f8
from fsdp_models import DIM, Mixture, converted, shard
from fsdp_training import adamw, same, sgd, train
from tests.helpers.collectives import CollectiveCounter
from tests.helpers.ranks import on_ranks

pytestmark = pytest.mark.distributed

RECIPES = ("tensorwise_delayed", "tensorwise", "rowwise", "blockwise")
WIDTHS = (DIM, 10, 135, 7)  # uneven over 2 and 4 ranks, and more than one block


def layers(seed=0, dtype=torch.float32):
    torch.manual_seed(seed)
    parts = [nn.Sequential(nn.Linear(a, b), nn.LayerNorm(b)) for a, b in itertools.pairwise(WIDTHS)]
    return nn.Sequential(*parts).to(dtype)


def experts(seed=0):
    torch.manual_seed(seed)
    return Mixture(3, first=seed)


def start(recipe, seed=0, make=layers):
    model = shard(converted(make(seed), recipe))
    return model, adamw(model.parameters())


def go_on(run, rank, first, last):
    return train(run[0], rank, last - first, first=first, optimizer=run[1])


def state_of(run):
    of_model, of_optimizer = get_state_dict(*run)
    return {"model": of_model, "optimizer": of_optimizer, "delayed": f8.DelayedState(run[0])}


def restore(run, path):
    state = state_of(run)
    dcp.load(state, checkpoint_id=path)
    set_state_dict(*run, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


def whole(state):
    """Return every tensor and number of a state by its place, gathered and copied."""
    state = {key: value.state_dict() if isinstance(value, f8.DelayedState) else value for key, value in state.items()}
    gathered = pytree.tree_map_only(DTensor, DTensor.full_tensor, state)
    leaves = {pytree.keystr(key): value for key, value in pytree.tree_flatten_with_path(gathered)[0]}
    return {key: v.clone() if isinstance(v, torch.Tensor) else v for key, v in leaves.items()}


def unlike(a, b):
    """Return the places where two whole states differ."""

    def equal(one, other):
        return same(one, other) if isinstance(one, torch.Tensor) else one == other

    return sorted((a.keys() | b.keys()) - {key for key in a.keys() & b.keys() if equal(a[key], b[key])})


def sharded_types(model):
    return {type(getattr(p, "_local_tensor", p)) for n, p in model.named_parameters() if n.endswith("0.weight")}


# ---------------------------------------------------------------- plain


@pytest.mark.parametrize("recipe", RECIPES)
@on_ranks(2)
def test_state_dicts_are_plain_and_name_nothing_of_this_package(rank, tmp_path, recipe):
    run = start(recipe)
    go_on(run, rank, 0, 1)
    f8.synchronize_scales(run[0])
    state, options = state_of(run), StateDictOptions(full_state_dict=True, cpu_offload=True)
    full = get_model_state_dict(run[0], options=options)
    dcp.save(state, checkpoint_id=tmp_path)
    torch.save(full, tmp_path / f"full{rank}.pt")
    tensors = [v for v in pytree.tree_leaves((state, run[0].state_dict(), full)) if isinstance(v, torch.Tensor)]
    assert {type(getattr(tensor, "_local_tensor", tensor)) for tensor in tensors} == {torch.Tensor}
    dist.barrier()
    written = [path.read_bytes() for path in tmp_path.iterdir()]
    assert sum(b"DTensor" in one or b"_rebuild_tensor" in one for one in written) > 1, "classes are named in the files"
    assert not any(name in one for one in written for name in (b"fp8_common", b"fp8_torch_fsdp"))


# ---------------------------------------------------------------- resuming and resharding


@pytest.mark.matrix("each", recipe=RECIPES, make=["layers", "experts"])
@on_ranks(3)
def test_a_resumed_run_continues_bit_for_bit(rank, tmp_path, recipe, make):
    """Also of a run that goes on while it is saved: the checkpoint holds the moment that it was asked for."""
    steady, saving, resumed = (start(recipe, seed, globals()[make]) for seed in (0, 0, 1))
    losses = go_on(steady, rank, 0, 4)
    go_on(saving, rank, 0, 2)
    with CollectiveCounter() as counted:
        state = state_of(saving)
    assert not counted.seen, "state dicts of model and optimizer wait for nobody"
    saved = dcp.async_save(state, checkpoint_id=tmp_path, process_group=dist.new_group(backend="gloo"))
    later = {"saving": go_on(saving, rank, 2, 4)}
    saved.result()
    restore(resumed, tmp_path)
    later["resumed"] = go_on(resumed, rank, 2, 4)
    for one in (steady, saving, resumed):
        f8.synchronize_scales(one[0])
    assert later == {"saving": losses[2:], "resumed": losses[2:]}
    for one in (saving, resumed):
        assert unlike(whole(state_of(one)), whole(state_of(steady))) == []


def load_and_save(rank, world_size, recipe, source, target, reference):
    run = start(recipe, seed=0 if source is None else 1)
    if source is None:
        go_on(run, rank, 0, 2)
        f8.synchronize_scales(run[0])
    else:
        restore(run, source)
    dcp.save(state_of(run), checkpoint_id=target)
    state = whole(state_of(run))
    if source is None:
        torch.save(state, f"{reference}{rank}")
    return unlike(state, torch.load(f"{reference}0", weights_only=True)) if source else []


@pytest.mark.parametrize("recipe", ["tensorwise_delayed", "blockwise"])
def test_two_ranks_then_four_then_one_keep_every_bit(run_ranks, tmp_path, recipe):
    on = {n: str(tmp_path / f"on{n}") for n in (2, 4, 1)} | {None: None}
    for source, world_size in ((None, 2), (2, 4), (4, 1)):
        arguments = recipe, on[source], on[world_size], str(tmp_path / "reference")
        assert run_ranks(world_size, load_and_save, *arguments) == [[]] * world_size


# ---------------------------------------------------------------- between FP8 and other models


@pytest.mark.matrix("each", recipe=RECIPES, dtype=[torch.float32, torch.bfloat16])
@on_ranks(2)
def test_plain_checkpoints_and_fp8_models_exchange_weights(rank, tmp_path, recipe, dtype):
    plain, back, (model, optimizer) = shard(layers(3, dtype)), shard(layers(4, dtype)), start(recipe)
    dcp.save({"model": plain.state_dict()}, checkpoint_id=tmp_path / "plain")
    go_on((model, optimizer), rank, 0, 1)
    f8.synchronize_scales(model)
    dcp.load({"model": model.state_dict()}, checkpoint_id=tmp_path / "plain")
    original, there = whole(plain.state_dict()), whole(model.state_dict())
    dcp.save({"model": model.state_dict()}, checkpoint_id=tmp_path / "fp8")
    dcp.load({"model": back.state_dict()}, checkpoint_id=tmp_path / "fp8")
    wide = {key: value.float() for key, value in original.items()}
    assert unlike(there, wide) == unlike(whole(back.state_dict()), original) == []
    assert sharded_types(model) == {f8.ShardedFloat8Weight}


# ---------------------------------------------------------------- meta device


def from_meta(recipe):
    with torch.device("meta"):
        model = converted(layers(), recipe)
    return shard(model)


@pytest.mark.parametrize("recipe", RECIPES)
@on_ranks(2)
def test_models_from_the_meta_device_become_the_saved_one(rank, tmp_path, recipe):
    saved, optimizer = start(recipe)
    go_on((saved, optimizer), rank, 0, 2)
    f8.synchronize_scales(saved)
    dcp.save({"model": saved.state_dict()}, checkpoint_id=tmp_path)
    full = get_model_state_dict(saved, options=StateDictOptions(full_state_dict=True))
    models = emptied, assigned, broadcast = [from_meta(recipe) for _ in range(3)]
    emptied.to_empty(device="cpu")
    dcp.load({"model": emptied.state_dict()}, checkpoint_id=tmp_path)
    assigned.load_state_dict({k: v.clone() for k, v in saved.state_dict().items()}, assign=True)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    # copied, because loading may assign what it gets
    full = {key: value.clone() for key, value in full.items()} if rank == 0 else {}
    set_model_state_dict(broadcast, full, options=options)
    for model in models:
        f8.DelayedState(model).load_state_dict(f8.DelayedState(saved).state_dict())
    assert [unlike(whole(model.state_dict()), whole(saved.state_dict())) for model in models] == [[]] * 3
    assert {kind for model in models for kind in sharded_types(model)} == {f8.ShardedFloat8Weight}
    losses, *others = (train(model, rank, first=2, optimizer=sgd) for model in (saved, *models))
    assert others == [losses] * 3
