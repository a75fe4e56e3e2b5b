"""Checkpoints are plain, lose no bit whatever reads them, and are whole or refused."""

import fractions
import itertools
import re
import shutil
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
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
from fp8_common import Fp8Error
from fp8_common.torch import read_metadata
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
    return {"model": of_model, "optimizer": of_optimizer}


def restore(run, path, **options):
    state = state_of(run)
    f8.load_checkpoint(state, path, **options)
    set_state_dict(*run, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


def whole(state):
    """Return every tensor and number of a state by its place, gathered and copied."""
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
    f8.sync_float8_amax_and_scale_history(run[0])
    state = state_of(run)
    tensors = [v for v in pytree.tree_leaves((state, run[0].state_dict())) if isinstance(v, torch.Tensor)]
    kinds = {type(t) for t in tensors} | {type(t._local_tensor) for t in tensors if isinstance(t, DTensor)}
    f8.save_checkpoint(state, f"{path}/dcp")
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
    assert full.keys() == converted.keys() and len(full) >= 12, (folder, full.keys())
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
    f8.sync_float8_amax_and_scale_history(steady[0])
    saving = start(recipe, world_size)
    losses = train(saving, rank, range(MIDDLE))
    with CollectiveCounter() as counted:
        state = state_of(saving)
    f8.save_checkpoint(state, path)
    state = None
    resumed = start(recipe, world_size, seed=1)
    restore(resumed, path)
    different = []
    for name, run in (("saving", saving), ("resumed", resumed)):
        if losses + train(run, rank, range(MIDDLE, END)) != expected:
            different.append(f"losses of {name}")
        f8.sync_float8_amax_and_scale_history(run[0])
        different += [f"{key} of {name}" for key in unlike(whole(state_of(run)), whole(state_of(steady)))]
    return len(counted.seen), different


@pytest.mark.matrix("each", recipe=RECIPES, world_size=[1, 2, 3])
def test_a_resumed_run_continues_bit_for_bit(run_ranks, tmp_path, recipe, world_size):
    for collectives, different in run_ranks(world_size, interrupt, recipe, str(tmp_path / "checkpoint")):
        assert not different
        assert collectives == 0, "state dicts are taken right after a step and wait for nobody"


def save_some(rank, world_size, recipe, target, reference):
    run = start(recipe, world_size)
    train(run, rank, range(3))
    f8.sync_float8_amax_and_scale_history(run[0])
    f8.save_checkpoint(state_of(run), target)
    state = whole(state_of(run))
    if rank == 0:
        torch.save(state, reference)


def load_and_save(rank, world_size, recipe, source, target, reference):
    run = start(recipe, world_size, seed=1)
    restore(run, source)
    different = unlike(whole(state_of(run)), torch.load(reference, weights_only=True))
    f8.save_checkpoint(state_of(run), target)
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
    f8.sync_float8_amax_and_scale_history(run[0])
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
    f8.save_checkpoint({"model": plain.state_dict()}, f"{path}/plain")
    model, _ = run = start(recipe, world_size)
    train(run, rank, range(1))
    f8.sync_float8_amax_and_scale_history(model)
    # histories of delayed scaling are no part of a plain checkpoint
    f8.load_checkpoint(
        {"model": model.state_dict()}, f"{path}/plain", planner=DefaultLoadPlanner(allow_partial_load=True)
    )
    original, there = whole(plain.state_dict()), whole(model.state_dict())
    there = {key: value for key, value in there.items() if ".fp8_" not in key}
    f8.save_checkpoint({"model": model.state_dict()}, f"{path}/fp8")
    back = shard(plain_model(seed=4, dtype=dtype), world_size)
    f8.load_checkpoint({"model": back.state_dict()}, f"{path}/fp8")
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
    f8.sync_float8_amax_and_scale_history(low)
    low.load_state_dict(plain.state_dict(), assign=assign)
    expected = f8.convert_to_float8_training(plain_model(seed=3), recipe=recipe)
    assert torch.equal(low(x), expected(x)), "a history from before the load must not be used"
    assert sharded_types(low) == {f8.ShardedFloat8Weight}
    back = plain_model(seed=4)
    missing, unexpected = back.load_state_dict(low.state_dict(), strict=False, assign=assign)
    assert not missing
    assert all(".fp8_" in key for key in unexpected)
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
    f8.sync_float8_amax_and_scale_history(saved[0])
    f8.save_checkpoint({"model": saved[0].state_dict()}, path)
    full = get_model_state_dict(saved[0], options=StateDictOptions(full_state_dict=True))

    emptied = meta_run(recipe, world_size)
    emptied.to_empty(device="cpu")
    f8.load_checkpoint({"model": emptied.state_dict()}, path)
    assigned = meta_run(recipe, world_size)
    assigned.load_state_dict({k: v.clone() for k, v in saved[0].state_dict().items()}, assign=True)
    broadcast = meta_run(recipe, world_size)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    # copied, because loading may assign what it gets
    full = {key: value.clone() for key, value in full.items()} if rank == 0 else {}
    set_model_state_dict(broadcast, full, options=options)

    models = {"to_empty": emptied, "assign": assigned, "broadcast": broadcast}
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


# ---------------------------------------------------------------- cut-off checkpoints

CUTS = {
    "deleted": lambda file: file.unlink(),
    "empty": lambda file: file.write_bytes(b""),
    "half": lambda file: file.write_bytes(file.read_bytes()[: file.stat().st_size // 2]),
    "last_byte": lambda file: file.write_bytes(file.read_bytes()[:-1]),
}


def load_damaged(rank, world_size, folders):
    """Return the error of each load, and what changed in the model and the optimizer."""
    run = start("tensorwise_delayed", world_size, seed=1)
    train(run, rank, range(1))
    f8.sync_float8_amax_and_scale_history(run[0])
    before = whole(state_of(run))
    errors = []
    for folder in folders:
        try:
            f8.load_checkpoint(state_of(run), folder)
            errors.append((folder, "loaded", ""))
        except Exception as error:
            errors.append((folder, type(error).__name__, str(error)))
    return errors, unlike(whole(state_of(run)), before)


def test_a_checkpoint_cut_off_anywhere_is_refused_and_nothing_is_loaded(run_ranks, tmp_path):
    whole_one = tmp_path / "whole"
    run_ranks(2, save_some, "tensorwise_delayed", str(whole_one), str(tmp_path / "reference.pt"))
    files = sorted(path.name for path in whole_one.iterdir())
    assert ".metadata" in files
    assert len(files) >= 3, "each rank has a file"
    folders = [str(tmp_path / "never_saved")]
    for name, (kind, cut) in itertools.product(files, CUTS.items()):
        folder = tmp_path / f"{name}-{kind}"
        shutil.copytree(whole_one, folder)
        cut(folder / name)
        folders.append(str(folder))
    for errors, changed in run_ranks(2, load_damaged, folders):
        assert [(folder, kind) for folder, kind, _ in errors] == [(folder, "Fp8Error") for folder in folders]
        assert all(folder in message for folder, _, message in errors)
        assert not changed
    f8.verify_checkpoint(whole_one)


def test_metadata_cut_off_at_any_byte_is_refused(run_ranks, tmp_path):
    checkpoint = tmp_path / "checkpoint"
    run_ranks(1, save_some, "rowwise", str(checkpoint), str(tmp_path / "reference.pt"))
    content = (checkpoint / ".metadata").read_bytes()
    for length in range(0, len(content), 7):
        (checkpoint / ".metadata").write_bytes(content[:length])
        with pytest.raises(Fp8Error, match="damaged"):
            f8.verify_checkpoint(checkpoint)
    (checkpoint / ".metadata").write_bytes(content)
    f8.verify_checkpoint(checkpoint)


def flip(file, place):
    """Change one bit in the middle of what lies there."""
    content = bytearray(file.read_bytes())
    content[place.offset + place.length // 2] ^= 16
    file.write_bytes(content)


def test_a_flipped_bit_is_noticed_and_named_wherever_it_is(run_ranks, tmp_path):
    whole_one = tmp_path / "whole"
    run_ranks(2, save_some, "tensorwise_delayed", str(whole_one), str(tmp_path / "reference.pt"))
    pieces = read_metadata(whole_one).storage_data
    assert len({place.relative_path for place in pieces.values()}) == 2, "each rank has a file"
    folders = {}
    for number, (index, place) in enumerate(pieces.items()):
        folder = tmp_path / f"{number}"
        shutil.copytree(whole_one, folder)
        flip(folder / place.relative_path, place)
        with pytest.raises(Fp8Error, match=f"{re.escape(place.relative_path)} has changed .* {re.escape(index.fqn)} "):
            f8.verify_checkpoint(folder)
        folders[str(folder)] = index.fqn
    some = dict(list(folders.items())[::9])
    for errors, changed in run_ranks(2, load_damaged, list(some)):
        assert [kind for _, kind, _ in errors] == ["Fp8Error"] * len(some)
        assert all(some[folder] in message for folder, _, message in errors)
        assert not changed


def save_over(rank, world_size, path):
    try:
        f8.save_checkpoint({"x": torch.ones(2)}, path)
    except Fp8Error as error:
        return str(error)


def test_only_an_older_checkpoint_is_replaced(run_ranks, tmp_path):
    """On all ranks, though the first alone looks."""
    (tmp_path / "thesis.txt").write_text("years")
    for message in run_ranks(2, save_over, str(tmp_path)):
        assert "is no checkpoint, so it is not replaced" in message
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]
    for _ in range(2):
        assert run_ranks(2, save_over, str(tmp_path / "own")) == [None, None]


def test_a_changed_index_is_damaged(run_ranks, tmp_path):
    checkpoint = tmp_path / "checkpoint"
    run_ranks(1, save_some, "rowwise", str(checkpoint), str(tmp_path / "reference.pt"))
    content = (checkpoint / ".metadata").read_bytes()
    for place in range(0, len(content), 11):
        changed = bytearray(content)
        changed[place] ^= 1
        (checkpoint / ".metadata").write_bytes(changed)
        with pytest.raises(Fp8Error, match="damaged"):
            f8.verify_checkpoint(checkpoint)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_checkpoint_without_checksums_loads(tmp_path):
    dcp.save({"weight": torch.arange(300.0)}, checkpoint_id=tmp_path, no_dist=True)
    f8.verify_checkpoint(tmp_path)
    f8.load_checkpoint(loaded := {"weight": torch.zeros(300)}, tmp_path, no_dist=True)
    assert torch.equal(loaded["weight"], torch.arange(300.0))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_pickled_object_among_the_values_is_not_made(tmp_path):
    state = {"weight": torch.ones(3), "note": fractions.Fraction(1, 3)}
    dcp.save(state, checkpoint_id=tmp_path, no_dist=True)
    with pytest.raises(dcp.api.CheckpointException, match="Weights only load failed"):
        f8.load_checkpoint({"weight": torch.zeros(3), "note": None}, tmp_path, no_dist=True)
    f8.load_checkpoint(loaded := {"weight": torch.zeros(3)}, tmp_path, no_dist=True)
    assert torch.equal(loaded["weight"], state["weight"])
    trusted = {"weight": torch.zeros(3), "note": None}
    f8.load_checkpoint(trusted, tmp_path, planner=DefaultLoadPlanner(), no_dist=True)
    assert trusted["note"] == state["note"]


def fail_to_save(rank, world_size, path):
    """One rank's disk is full."""
    state = state_of(start("tensorwise", world_size, seed=1))
    full = mock.patch.object(dcp.FileSystemWriter, "write_data", side_effect=OSError("No space left on device"))
    try:
        with full if rank == world_size - 1 else nullcontext():
            f8.save_checkpoint(state, path)
    except dcp.api.CheckpointException as error:
        return str(error)
    return "saved"


def test_a_failed_save_leaves_the_older_checkpoint_alone(run_ranks, tmp_path):
    checkpoint = tmp_path / "checkpoint"
    run_ranks(2, save_some, "tensorwise", str(checkpoint), str(tmp_path / "reference.pt"))
    content = {path.name: path.read_bytes() for path in checkpoint.iterdir()}
    assert all("No space left" in message for message in run_ranks(2, fail_to_save, str(checkpoint)))
    assert {path.name: path.read_bytes() for path in checkpoint.iterdir()} == content
    with pytest.raises(Fp8Error):
        f8.verify_checkpoint(Path(f"{checkpoint}.partial"))


def test_delayed_state_stays_float32_whatever_the_model_becomes():
    model = f8.convert_to_float8_training(plain_model(), recipe="tensorwise_delayed").to(torch.bfloat16)
    buffers = dict(model.named_buffers())
    floating = {name: b.dtype for name, b in buffers.items() if b.is_floating_point()}
    assert len(floating) == 3 * 3 * 2, "scale and history of three operands in three layers"
    assert set(floating.values()) == {torch.float32}
