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
from tests.helpers.collectives import CollectiveCounter
from tests.helpers.fsdp_models import DIM, Mixture, converted, shard
from tests.helpers.fsdp_training import adamw, batch, same, sgd, train

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


def kinds_in_state_dicts(rank, world_size, recipe, path):
    run = start(recipe)
    go_on(run, rank, 0, 1)
    f8.synchronize_scales(run[0])
    state, options = state_of(run), StateDictOptions(full_state_dict=True, cpu_offload=True)
    full = get_model_state_dict(run[0], options=options)
    dcp.save(state, checkpoint_id=path)
    if rank == 0:
        torch.save(full, f"{path}/full.pt")
    tensors = [v for v in pytree.tree_leaves((state, run[0].state_dict(), full)) if isinstance(v, torch.Tensor)]
    return {type(t) for t in tensors} | {type(t._local_tensor) for t in tensors if isinstance(t, DTensor)}


@pytest.mark.parametrize("recipe", RECIPES)
def test_state_dicts_are_plain_and_name_nothing_of_this_package(run_ranks, tmp_path, recipe):
    assert run_ranks(2, kinds_in_state_dicts, recipe, str(tmp_path)) == [{torch.Tensor, DTensor}] * 2
    written = [path.read_bytes() for path in tmp_path.iterdir()]
    assert sum(b"DTensor" in one or b"_rebuild_tensor" in one for one in written) > 1, "classes are named in the files"
    assert not any(name in one for one in written for name in (b"fp8_common", b"fp8_torch_fsdp"))


# ---------------------------------------------------------------- resuming and resharding


def interrupt(rank, world_size, recipe, make, path):
    """Return what differs between an uninterrupted run, one that saved half-way, and one resumed from there."""
    steady, saving, resumed = (start(recipe, seed, globals()[make]) for seed in (0, 0, 1))
    losses = go_on(steady, rank, 0, 4)
    go_on(saving, rank, 0, 2)
    with CollectiveCounter() as counted:
        state = state_of(saving)
    saved = dcp.async_save(state, checkpoint_id=path, process_group=dist.new_group(backend="gloo"))
    later = {"saving": go_on(saving, rank, 2, 4)}  # the checkpoint holds the moment that it was asked for
    saved.result()
    restore(resumed, path)
    later["resumed"] = go_on(resumed, rank, 2, 4)
    for one in (steady, saving, resumed):
        f8.synchronize_scales(one[0])
    different = [f"losses of {name}" for name, own in later.items() if own != losses[2:]]
    for one in (saving, resumed):
        different += unlike(whole(state_of(one)), whole(state_of(steady)))
    return len(counted.seen), different


@pytest.mark.matrix("each", recipe=RECIPES, world_size=[2, 3, 1], make=["layers", "experts"])
def test_a_resumed_run_continues_bit_for_bit(run_ranks, tmp_path, recipe, world_size, make):
    for collectives, different in run_ranks(world_size, interrupt, recipe, make, str(tmp_path / "checkpoint")):
        assert not different
        assert collectives == 0, "state dicts of model and optimizer wait for nobody"


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


def exchange_with_plain_model(rank, world_size, recipe, dtype, path):
    """Load a plain checkpoint into an FP8 model and back; return what changed on the way."""
    plain, back, (model, optimizer) = shard(layers(3, dtype)), shard(layers(4, dtype)), start(recipe)
    dcp.save({"model": plain.state_dict()}, checkpoint_id=f"{path}/plain")
    go_on((model, optimizer), rank, 0, 1)
    f8.synchronize_scales(model)
    dcp.load({"model": model.state_dict()}, checkpoint_id=f"{path}/plain")
    original, there = whole(plain.state_dict()), whole(model.state_dict())
    dcp.save({"model": model.state_dict()}, checkpoint_id=f"{path}/fp8")
    dcp.load({"model": back.state_dict()}, checkpoint_id=f"{path}/fp8")
    wide = {key: value.float() for key, value in original.items()}
    return unlike(there, wide), unlike(whole(back.state_dict()), original), sharded_types(model)


@pytest.mark.matrix("each", recipe=RECIPES, dtype=[torch.float32, torch.bfloat16])
def test_plain_checkpoints_and_fp8_models_exchange_weights(run_ranks, tmp_path, recipe, dtype):
    expected = [], [], {f8.ShardedFloat8Weight}
    assert run_ranks(2, exchange_with_plain_model, recipe, dtype, str(tmp_path)) == [expected] * 2


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("recipe", RECIPES)
def test_state_dicts_pass_between_linear_layers_in_one_process(recipe, assign):
    plain, back, low, expected = layers(3), layers(4), converted(layers(), recipe), converted(layers(3), recipe)
    low(50 * batch(0)).sum().backward()
    f8.synchronize_scales(low)
    low.load_state_dict(plain.state_dict(), assign=assign)
    f8.DelayedState(low).load_state_dict({})  # a run that is started anew
    assert torch.equal(low(batch(0)), expected(batch(0)))
    assert sharded_types(low) == {f8.ShardedFloat8Weight}
    back.load_state_dict(low.state_dict(), assign=assign)
    assert not unlike(dict(back.state_dict()), dict(plain.state_dict()))
    assert {type(p) for p in back.parameters()} == {nn.Parameter}


# ---------------------------------------------------------------- meta device


def from_meta(recipe):
    with torch.device("meta"):
        model = converted(layers(), recipe)
    return shard(model)


def fill_meta_models(rank, world_size, recipe, path):
    """Return how models that start on the meta device differ from the one that was saved, by way of loading."""
    saved, optimizer = start(recipe)
    go_on((saved, optimizer), rank, 0, 2)
    f8.synchronize_scales(saved)
    dcp.save({"model": saved.state_dict()}, checkpoint_id=path)
    full = get_model_state_dict(saved, options=StateDictOptions(full_state_dict=True))
    models = emptied, assigned, broadcast = [from_meta(recipe) for _ in range(3)]
    emptied.to_empty(device="cpu")
    dcp.load({"model": emptied.state_dict()}, checkpoint_id=path)
    assigned.load_state_dict({k: v.clone() for k, v in saved.state_dict().items()}, assign=True)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    # copied, because loading may assign what it gets
    full = {key: value.clone() for key, value in full.items()} if rank == 0 else {}
    set_model_state_dict(broadcast, full, options=options)
    for model in models:
        f8.DelayedState(model).load_state_dict(f8.DelayedState(saved).state_dict())
    different = [unlike(whole(model.state_dict()), whole(saved.state_dict())) for model in models]
    types = set().union(*(sharded_types(model) for model in models))
    losses = [train(model, rank, first=2, optimizer=sgd) for model in (saved, *models)]
    return different, types, [own == losses[0] for own in losses]


@pytest.mark.parametrize("recipe", RECIPES)
def test_models_from_the_meta_device_become_the_saved_one(run_ranks, tmp_path, recipe):
    expected = [[], [], []], {f8.ShardedFloat8Weight}, [True] * 4
    assert run_ranks(2, fill_meta_models, recipe, str(tmp_path / "checkpoint")) == [expected] * 2
