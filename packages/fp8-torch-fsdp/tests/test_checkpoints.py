"""Checkpoints are plain, lose no bit whatever reads them, and are whole or refused."""

import itertools
import subprocess
import sys

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
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

import fp8_torch_fsdp as f8
from tests.helpers.collectives import CollectiveCounter

pytestmark = pytest.mark.distributed

RECIPES = ("tensorwise", "tensorwise_delayed", "rowwise", "blockwise")
WIDTHS = (24, 10, 135, 7)  # uneven over 2 and 4 ranks, and more than one block
MIDDLE, END = 4, 8


def plain_model(seed=0, dtype=torch.float32):
    torch.manual_seed(seed)
    layers = [nn.Sequential(nn.Linear(a, b), nn.LayerNorm(b)) for a, b in itertools.pairwise(WIDTHS)]
    return nn.Sequential(*layers).to(dtype)


def shard(model, world_size):
    mesh = init_device_mesh("cpu", (world_size,))
    for block in model:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def start(recipe, world_size, seed=0):
    model = shard(f8.convert_to_float8_training(plain_model(seed), recipe=recipe), world_size)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def train(run, rank, steps):
    """Make the numbered steps; a step's data depend on its number and the rank alone."""
    model, optimizer = run
    losses = []
    for step in steps:
        generator = torch.Generator().manual_seed(100 * step + rank)
        loss = (model(torch.randn(16, WIDTHS[0], generator=generator)) - 1).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def state_of(run):
    of_model, of_optimizer = get_state_dict(*run)
    return {"model": of_model, "optimizer": of_optimizer, "delayed": f8.DelayedState(run[0])}


def restore(run, path, **options):
    state = state_of(run)
    dcp.load(state, checkpoint_id=path, **options)
    set_state_dict(*run, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


def whole(state):
    """Return every tensor and number of a state by its place, gathered and copied."""
    state = {key: value.state_dict() if isinstance(value, f8.DelayedState) else value for key, value in state.items()}
    gathered = pytree.tree_map_only(DTensor, DTensor.full_tensor, state)
    leaves = {pytree.keystr(key): value for key, value in pytree.tree_flatten_with_path(gathered)[0]}
    return {key: v.clone() if isinstance(v, torch.Tensor) else v for key, v in leaves.items()}


def unlike(a, b):
    """Return the places where two whole states differ."""
    same = {k for k in a.keys() & b.keys() if _equal(a[k], b[k])}
    return sorted((a.keys() | b.keys()) - same)


def _equal(a, b):
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


def sharded_types(model):
    return {type(getattr(p, "_local_tensor", p)) for n, p in model.named_parameters() if n.endswith("0.weight")}


# ---------------------------------------------------------------- plain


def kinds_in_state_dicts(rank, world_size, recipe, path):
    run = start(recipe, world_size)
    train(run, rank, range(1))
    f8.synchronize_scales(run[0])
    state = state_of(run)
    tensors = [v for v in pytree.tree_leaves((state, run[0].state_dict())) if isinstance(v, torch.Tensor)]
    kinds = {type(t) for t in tensors} | {type(t._local_tensor) for t in tensors if isinstance(t, DTensor)}
    dcp.save(state, checkpoint_id=f"{path}/dcp")
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    full = get_model_state_dict(run[0], options=options)
    if rank == 0:
        torch.save(full, f"{path}/full.pt")
    return kinds


STRANGER = """
import sys
sys.modules.update(fp8_common=None, fp8_torch_fsdp=None)  # importing them fails from here on
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
for folder in sys.argv[1:]:
    dcp_to_torch_save(f"{folder}/dcp", f"{folder}/converted.pt")
    full = torch.load(f"{folder}/full.pt", weights_only=True)
    converted = torch.load(f"{folder}/converted.pt", weights_only=True)["model"]
    assert full.keys() == converted.keys() and len(full) == 12, (folder, full.keys())
    assert all(type(full[k]) is torch.Tensor and torch.equal(full[k], converted[k]) for k in full), folder
"""


def test_state_dicts_are_plain_and_load_without_this_package(run_ranks, tmp_path):
    folders = [tmp_path / recipe for recipe in RECIPES]
    for folder in folders:
        folder.mkdir()
        for kinds in run_ranks(2, kinds_in_state_dicts, folder.name, str(folder)):
            assert kinds == {torch.Tensor, DTensor}, folder.name
    # one process for all recipes: it imports torch, which takes longer than what it checks
    command = [sys.executable, "-W", "error::ImportWarning", "-c", STRANGER, *map(str, folders)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


# ---------------------------------------------------------------- resuming and resharding


def interrupt(rank, world_size, recipe, path):
    """Return what differs between an uninterrupted run, one that saved half-way, and one resumed from there."""
    steady = start(recipe, world_size)
    expected = train(steady, rank, range(END))
    f8.synchronize_scales(steady[0])
    saving = start(recipe, world_size)
    losses = train(saving, rank, range(MIDDLE))
    with CollectiveCounter() as counted:
        state = state_of(saving)
    dcp.save(state, checkpoint_id=path)
    state = None
    resumed = start(recipe, world_size, seed=1)
    restore(resumed, path)
    different = []
    for name, run in (("saving", saving), ("resumed", resumed)):
        if losses + train(run, rank, range(MIDDLE, END)) != expected:
            different.append(f"losses of {name}")
        f8.synchronize_scales(run[0])
        different += [f"{key} of {name}" for key in unlike(whole(state_of(run)), whole(state_of(steady)))]
    return len(counted.seen), different


@pytest.mark.matrix("each", recipe=RECIPES, world_size=[1, 2, 3])
def test_a_resumed_run_continues_bit_for_bit(run_ranks, tmp_path, recipe, world_size):
    for collectives, different in run_ranks(world_size, interrupt, recipe, str(tmp_path / "checkpoint")):
        assert not different
        assert collectives == 0, "state dicts of model and optimizer wait for nobody"


def save_some(rank, world_size, recipe, target, reference):
    run = start(recipe, world_size)
    train(run, rank, range(3))
    f8.synchronize_scales(run[0])
    dcp.save(state_of(run), checkpoint_id=target)
    state = whole(state_of(run))
    if rank == 0:
        torch.save(state, reference)


def load_and_save(rank, world_size, recipe, source, target, reference):
    run = start(recipe, world_size, seed=1)
    restore(run, source)
    different = unlike(whole(state_of(run)), torch.load(reference, weights_only=True))
    dcp.save(state_of(run), checkpoint_id=target)
    losses = train(run, rank, range(3, 5))
    return different, all(loss < 10 for loss in losses)


@pytest.mark.parametrize("recipe", RECIPES)
def test_two_ranks_then_four_then_one_keep_every_bit(run_ranks, tmp_path, recipe):
    on = {n: str(tmp_path / f"on{n}") for n in (2, 4, 1)}
    reference = str(tmp_path / "reference.pt")
    run_ranks(2, save_some, recipe, on[2], reference)
    for source, world_size in ((2, 4), (4, 1)):
        for result in run_ranks(world_size, load_and_save, recipe, on[source], on[world_size], reference):
            assert result == ([], True)


def save_beside_training(rank, world_size, recipe, path):
    run = start(recipe, world_size)
    train(run, rank, range(2))
    f8.synchronize_scales(run[0])
    before = whole(state_of(run))
    future = dcp.async_save(state_of(run), checkpoint_id=path, process_group=dist.new_group(backend="gloo"))
    losses = train(run, rank, range(2, 4))
    future.result()
    loaded = start(recipe, world_size, seed=1)
    restore(loaded, path)
    different = unlike(whole(state_of(loaded)), before)
    return different, train(loaded, rank, range(2, 4)) == losses


@pytest.mark.parametrize("recipe", RECIPES)
def test_an_asynchronous_save_holds_the_moment_it_was_asked_for(run_ranks, tmp_path, recipe):
    for result in run_ranks(2, save_beside_training, recipe, str(tmp_path)):
        assert result == ([], True)


# ---------------------------------------------------------------- between FP8 and other models


def exchange_with_plain_model(rank, world_size, recipe, dtype, path):
    """Load a plain checkpoint into an FP8 model and back; return what changed on the way."""
    plain = shard(plain_model(seed=3, dtype=dtype), world_size)
    dcp.save({"model": plain.state_dict()}, checkpoint_id=f"{path}/plain")
    model, _ = run = start(recipe, world_size)
    train(run, rank, range(1))
    f8.synchronize_scales(model)
    dcp.load({"model": model.state_dict()}, checkpoint_id=f"{path}/plain")
    original, there = whole(plain.state_dict()), whole(model.state_dict())
    dcp.save({"model": model.state_dict()}, checkpoint_id=f"{path}/fp8")
    back = shard(plain_model(seed=4, dtype=dtype), world_size)
    dcp.load({"model": back.state_dict()}, checkpoint_id=f"{path}/fp8")
    wide = {key: value.float() for key, value in original.items()}
    return unlike(there, wide), unlike(whole(back.state_dict()), original), sharded_types(model)


@pytest.mark.matrix("each", recipe=RECIPES, dtype=[torch.float32, torch.bfloat16])
def test_plain_checkpoints_and_fp8_models_exchange_weights(run_ranks, tmp_path, recipe, dtype):
    for there, back, types in run_ranks(2, exchange_with_plain_model, recipe, dtype, str(tmp_path)):
        assert (there, back) == ([], [])
        assert types == {f8.ShardedFloat8Weight}


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("recipe", RECIPES)
def test_state_dicts_pass_between_linear_layers_in_one_process(recipe, assign):
    plain = plain_model(seed=3)
    low = f8.convert_to_float8_training(plain_model(), recipe=recipe)
    x = torch.randn(16, WIDTHS[0])
    low(50 * x).sum().backward()
    f8.synchronize_scales(low)
    low.load_state_dict(plain.state_dict(), assign=assign)
    expected = f8.convert_to_float8_training(plain_model(seed=3), recipe=recipe)
    f8.DelayedState(low).load_state_dict({})  # a run that is started anew
    assert torch.equal(low(x), expected(x))
    assert sharded_types(low) == {f8.ShardedFloat8Weight}
    back = plain_model(seed=4)
    back.load_state_dict(low.state_dict(), assign=assign)
    assert not unlike(dict(back.state_dict()), dict(plain.state_dict()))
    assert {type(p) for p in back.parameters()} == {nn.Parameter}


# ---------------------------------------------------------------- meta device


def meta_run(recipe, world_size):
    with torch.device("meta"):
        model = f8.convert_to_float8_training(plain_model(), recipe=recipe)
    return shard(model, world_size)


def fill_meta_models(rank, world_size, recipe, path):
    """Return how models that start on the meta device differ from the one that was saved, by way of loading."""
    saved = start(recipe, world_size)
    train(saved, rank, range(2))
    f8.synchronize_scales(saved[0])
    dcp.save({"model": saved[0].state_dict()}, checkpoint_id=path)
    full = get_model_state_dict(saved[0], options=StateDictOptions(full_state_dict=True))
    delayed = f8.DelayedState(saved[0]).state_dict()

    emptied = meta_run(recipe, world_size)
    emptied.to_empty(device="cpu")
    dcp.load({"model": emptied.state_dict()}, checkpoint_id=path)
    assigned = meta_run(recipe, world_size)
    assigned.load_state_dict({k: v.clone() for k, v in saved[0].state_dict().items()}, assign=True)
    broadcast = meta_run(recipe, world_size)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    # copied, because loading may assign what it gets
    full = {key: value.clone() for key, value in full.items()} if rank == 0 else {}
    set_model_state_dict(broadcast, full, options=options)

    models = {"to_empty": emptied, "assign": assigned, "broadcast": broadcast}
    for model in models.values():
        f8.DelayedState(model).load_state_dict(delayed)
    different = {n: unlike(whole(m.state_dict()), whole(saved[0].state_dict())) for n, m in models.items()}
    types = set().union(*(sharded_types(model) for model in models.values()))
    runs = [saved[0], *models.values()]
    losses = [train((m, torch.optim.SGD(m.parameters(), lr=0.1)), rank, range(2, 5)) for m in runs]
    return different, types, [a == losses[0] for a in losses[1:]]


@pytest.mark.parametrize("recipe", RECIPES)
def test_models_from_the_meta_device_become_the_saved_one(run_ranks, tmp_path, recipe):
    for different, types, same_losses in run_ranks(2, fill_meta_models, recipe, str(tmp_path / "checkpoint")):
        assert different == {"to_empty": [], "assign": [], "broadcast": []}
        assert types == {f8.ShardedFloat8Weight}
        assert same_losses == [True, True, True]


def test_delayed_state_stays_float32_whatever_the_model_becomes():
    model = f8.convert_to_float8_training(plain_model(), recipe="tensorwise_delayed").to(torch.bfloat16)
    buffers = dict(model.named_buffers())
    floating = {name: b.dtype for name, b in buffers.items() if b.is_floating_point()}
    assert len(floating) == 3 * 3 * 2, "scale and history of three operands in three layers"
    assert set(floating.values()) == {torch.float32}
