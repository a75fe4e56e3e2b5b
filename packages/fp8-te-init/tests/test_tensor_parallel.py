"""Tensor-parallel FP8 weights under torch's own styles, alone and under FSDP2: the numbers of the unsharded weight."""

import io
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
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import fp8_te_init as fti
from fp8_common import Fp8Error
from fp8_te_init._compat import local_of
from fp8_te_init._kept_in_module import named_kept
from fp8_te_init._waiting import agree_on_waiting
from tests.helpers.parallel_twins import ParallelTwin, distribute_like, slice_of, whole_of

pytestmark = pytest.mark.distributed

RECIPES = ("tensorwise", "rowwise", "blockwise", "tensorwise_delayed")
# (data-parallel ranks or None for tensor parallelism alone, tensor-parallel ranks)
MESHES = [(2, 2), (None, 4), (None, 2)]


def widths(recipe):
    """Uneven over two and four ranks, where blocks allow it."""
    return (24, 512, 136) if recipe == "blockwise" else (24, 43, 18)


class Net(nn.Module):
    def __init__(self, sizes, dtype=torch.float32):
        super().__init__()
        self.up, self.down = nn.Linear(*sizes[:2], dtype=dtype), nn.Linear(*sizes[1:], dtype=dtype)

    def forward(self, x):
        return self.down(torch.nn.functional.gelu(self.up(x)))


def net(recipe, preserve="cpu", dtype=torch.float32, seed=0, device="cpu"):
    torch.manual_seed(seed)
    with torch.device(device), fti.primary_weights(recipe, preserve=preserve):
        return Net(widths(recipe), dtype)


def mesh_of(ranks):
    dp, tp = ranks
    if dp is None:
        return init_device_mesh("cpu", (tp,), mesh_dim_names=("tp",))
    return init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp", "tp"))


def parallel(model, ranks):
    mesh = mesh_of(ranks)
    parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    if ranks[0] is not None:
        for layer in (model.up, model.down):
            fully_shard(layer, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])
    return model


def world_of(ranks):
    return (ranks[0] or 1) * ranks[1]


def layers(model):
    return {"up": model.up, "down": model.down}


def has_slices_of(model, whole):
    """Return what differs between the codes and scales held here and the slices of an unsharded model."""
    unlike = []
    for name, layer in layers(model).items():
        primary, reference = local_of(layer.weight), layers(whole)[name].weight
        if not torch.equal(primary.quantized_rows.codes(), slice_of(reference.state.codes, layer.weight)):
            unlike.append(f"codes of {name}")
        if not torch.equal(primary.scale, reference.scale):
            unlike.append(f"scale of {name}")
    return unlike


# ---------------------------------------------------------------- codes, masters, steps


def cut_and_stepped(rank, world_size, ranks, recipe, dtype):
    model, whole = parallel(net(recipe, dtype=dtype), ranks), net(recipe, dtype=dtype)
    unlike = [has_slices_of(model, whole)]
    options = {"lr": 1e-2, "round_through_dtype": dtype == torch.bfloat16}
    optimizer, reference = (fti.MasterOptimizer(torch.optim.AdamW, m.parameters(), **options) for m in (model, whole))
    report = fti.seed_masters(optimizer, model)
    fti.seed_masters(reference, whole)
    masters = [
        torch.equal(
            local_of(optimizer.master_of(mine.weight)), slice_of(reference.master_of(theirs.weight), mine.weight)
        )
        for mine, theirs in both_layers(model, whole)
    ]
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        for (_, mine), (_, theirs) in zip(model.named_parameters(), whole.named_parameters(), strict=True):
            theirs.grad = torch.randn(theirs.shape, generator=generator).to(dtype)
            mine.grad = distribute_like(theirs.grad, mine) if isinstance(mine, DTensor) else theirs.grad.clone()
        optimizer.step()
        reference.step()
        unlike.append(has_slices_of(model, whole))
    exact = all(
        torch.equal(whole_of(optimizer.master_of(mine.weight)), reference.master_of(theirs.weight))
        for mine, theirs in both_layers(model, whole)
    )
    return unlike, masters, set(report.sources.values()), exact, optimizer.reductions


@pytest.mark.matrix("each", recipe=[*RECIPES, *RECIPES[:2]], ranks=MESHES, dtype=[torch.float32, torch.bfloat16])
def test_codes_masters_and_steps_are_those_of_the_unsharded_weight(run_ranks, ranks, recipe, dtype):
    for unlike, masters, sources, exact, reductions in run_ranks(
        world_of(ranks), cut_and_stepped, ranks, recipe, dtype
    ):
        assert not any(unlike), unlike
        assert all(masters), "masters are the slices"
        assert sources == {"copy"}
        assert exact, "masters of all ranks together are those of the unsharded model"
        assert reductions == 3, "one all-reduce for each step, over all ranks that hold parts"


def from_source(rank, world_size, ranks, recipe, source, folder):
    """Return whether masters of one kind of start are the slices of the unsharded model's."""
    preserve = source if source in ("cpu", "residual", "replay") else "none"
    whole, model = (net(recipe, preserve, torch.bfloat16) for _ in range(2))
    # drawn before it is cut, the same on all ranks
    other = Net(widths(recipe))
    options = {"strict": False, "source_order": ("dither",), "seed": 3} if source == "dither" else {}
    if source in CHECKPOINTS:
        options["checkpoint"] = checkpoint_of(other, source, recipe, folder, rank, ranks)
    parallel(model, ranks)
    optimizer, reference = (fti.MasterOptimizer(torch.optim.SGD, m.parameters(), lr=0.1) for m in (model, whole))
    report = fti.seed_masters(optimizer, model, **options)
    if source == "distributed":
        options["checkpoint"] = other.state_dict()
    fti.seed_masters(reference, whole, **options)
    same = {
        name: torch.equal(
            local_of(optimizer.master_of(layer.weight)),
            slice_of(reference.master_of(layers(whole)[name].weight), layer.weight),
        )
        for name, layer in layers(model).items()
    }
    return same, has_slices_of(model, whole), set(report.sources.values()), sum(c.nbytes for *_, c in named_kept(model))


def checkpoint_of(other, source, recipe, folder, rank, ranks):
    if source == "plain":
        return other.state_dict()
    if source == "distributed":
        placed = parallel(other_copy(other), ranks)
        return dict(placed.state_dict())
    if source == "fp8":
        return fti.convert_linear(other_copy(other), recipe=recipe, preserve="none").state_dict()
    if rank == 0 and source == "file":
        torch.save(other.state_dict(), f"{folder}/model.pt")
    if source == "folder":
        dcp.save(other.state_dict(), checkpoint_id=f"{folder}/model")
    dist.barrier()
    return f"{folder}/model" + (".pt" if source == "file" else "")


def other_copy(model):
    twin = Net((model.up.in_features, model.up.out_features, model.down.out_features))
    twin.load_state_dict(model.state_dict())
    return twin


CHECKPOINTS = ["plain", "file", "folder", "distributed", "fp8"]
SOURCES = ["cpu", "residual", "replay", "dither", *CHECKPOINTS]


@pytest.mark.matrix("each", source=SOURCES, ranks=[(None, 2), (2, 2)], recipe=RECIPES[:3])
def test_every_source_gives_the_columns_and_rows_that_are_held_here(run_ranks, source, ranks, recipe, tmp_path):
    for same, unlike, sources, left in run_ranks(world_of(ranks), from_source, ranks, recipe, source, str(tmp_path)):
        assert all(same.values()), same
        assert not unlike
        assert len(sources) == 1
        assert left == 0, "nothing is kept after masters were seeded"


# ---------------------------------------------------------------- training


def trained(rank, world_size, ranks, recipe, dtype):
    """Return losses of an FP8 model, of plain weights that are cast at each forward, and whether they end alike."""
    model = parallel(net(recipe, dtype=dtype), ranks)
    twin = parallel(twin_of(net(recipe, dtype=dtype), recipe, dtype), ranks)
    low = dtype == torch.bfloat16
    optimizer = fti.MasterOptimizer(torch.optim.AdamW, model.parameters(), lr=1e-2, round_through_dtype=low)
    kind = [fti.MasterOptimizer, torch.optim.AdamW] if low else [torch.optim.AdamW]
    reference = kind[0](*kind[1:], twin.parameters(), lr=1e-2)
    fti.seed_masters(optimizer, model)
    losses = []
    for step in range(4):
        generator = torch.Generator().manual_seed(10 * step + rank // ranks[1])
        x = torch.randn(16, 24, generator=generator).to(dtype)
        both = [(m(x).float() - 1).square().mean() for m in (model, twin)]
        for loss in both:
            loss.backward()
        for each in (optimizer, reference):
            each.step()
            each.zero_grad()
        losses.append([loss.item() for loss in both])
    same = all(
        torch.equal(local_of(optimizer.master_of(mine.weight)), local_of(trains(reference, theirs.weight)))
        for mine, theirs in both_layers(model, twin)
    )
    return losses, same


def trains(optimizer, parameter):
    return optimizer.master_of(parameter) if isinstance(optimizer, fti.MasterOptimizer) else parameter


def twin_of(model, recipe, dtype):
    torch.manual_seed(0)
    twin = Net(widths(recipe), dtype)
    for layer in layers(twin).values():
        layer.__class__, layer.recipe = ParallelTwin, recipe
    return twin


@pytest.mark.matrix("each", recipe=RECIPES[:3], ranks=[(2, 2), (None, 2)], dtype=[torch.float32, torch.bfloat16])
def test_training_has_the_bits_of_plain_weights_that_are_cast_at_each_forward(run_ranks, ranks, recipe, dtype):
    for losses, same in run_ranks(world_of(ranks), trained, ranks, recipe, dtype):
        assert all(ours == theirs for ours, theirs in losses), losses
        assert losses[-1][0] < losses[0][0]
        assert same, "masters are the twin's weights"


# ---------------------------------------------------------------- starts


def deferred(rank, world_size, ranks, recipe):
    """Build on the meta device, cut, then draw."""
    model = parallel(net(recipe, device="meta"), ranks)
    model.to_empty(device="cpu")
    whole = net(recipe)
    for each in (model, whole):
        torch.manual_seed(7)
        for layer in layers(each).values():
            layer.reset_parameters()
    for layer in layers(model).values():
        agree_on_waiting(layer.weight)
    unlike = has_slices_of(model, whole)
    optimizer = fti.MasterOptimizer(torch.optim.SGD, model.parameters(), lr=0.1)
    fti.seed_masters(optimizer, model)
    both = list(both_layers(model, whole))
    biases = [torch.equal(whole_of(layer.bias), other.bias) for layer, other in both]
    masters = [(optimizer.master_of(layer.weight), other.weight.get_high_precision_init_val()) for layer, other in both]
    return unlike, [torch.equal(whole_of(master), start) for master, start in masters], biases


def both_layers(model, whole):
    return zip(layers(model).values(), layers(whole).values(), strict=True)


@pytest.mark.matrix("each", recipe=RECIPES[:3], ranks=[(None, 2), (2, 2), (None, 4)])
def test_a_model_that_is_cut_on_the_meta_device_draws_the_unsharded_start(run_ranks, ranks, recipe):
    for unlike, starts, biases in run_ranks(world_of(ranks), deferred, ranks, recipe):
        assert not unlike
        assert all(starts)
        assert all(biases)


def other_weights(rank, world_size, preserve):
    """Cut weights that each rank drew for itself; then assign a distributed parameter of other values."""
    model, first = net("tensorwise", preserve, seed=rank), net("tensorwise", preserve, seed=0)
    parallel(model, (None, 2))
    unlike = has_slices_of(model, first)
    third, assigned = net("tensorwise", seed=9), net("tensorwise", preserve, seed=9)
    torch.manual_seed(3)
    values = torch.randn(43, 24)
    assigned.up.weight = nn.Parameter(distribute_tensor(values, mesh_of((None, 2)), [Shard(0)]))
    with torch.no_grad():
        third.up.weight.copy_(values)
    agree_on_waiting(assigned.up.weight)
    taken = slice_of(third.up.weight.state.codes, assigned.up.weight)
    return unlike, torch.equal(local_of(assigned.up.weight).quantized_rows.codes(), taken)


@pytest.mark.parametrize("preserve", ["cpu", "none"])
def test_the_first_ranks_weights_count_and_other_values_are_taken(run_ranks, preserve):
    for unlike, taken in run_ranks(2, other_weights, preserve):
        assert not unlike
        assert taken


def edited(rank, world_size, ranks):
    model, whole = parallel(net("tensorwise"), ranks), net("tensorwise")
    with torch.no_grad():
        for mine, theirs in both_layers(model, whole):
            for layer in (mine, theirs):
                layer.weight.mul_(1.5)
    model(torch.ones(4, 24))
    if ranks[0] is not None:
        model.reshard()
    return has_slices_of(model, whole)


@pytest.mark.parametrize("ranks", [(None, 2), (2, 2)])
def test_what_is_written_to_parts_gets_one_scale_before_the_next_product(run_ranks, ranks):
    assert run_ranks(world_of(ranks), edited, ranks) == [[]] * world_of(ranks)


# ---------------------------------------------------------------- checkpoints


def started(ranks, recipe, seed=0):
    model = net(recipe, seed=seed)
    if ranks is not None:
        parallel(model, ranks)
    optimizer = fti.MasterOptimizer(torch.optim.AdamW, model.parameters(), lr=1e-2)
    fti.seed_masters(optimizer, model)
    return model, optimizer


def one_step(model, optimizer):
    x = torch.randn(8, 24, generator=torch.Generator().manual_seed(1))
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def states_of(model, optimizer):
    of_model, of_optimizer = get_state_dict(model, optimizer)
    return {"model": of_model, "optimizer": of_optimizer}


def facts(model, optimizer):
    """Return whole codes, scales and masters, equal on all ranks."""
    state, found = model.state_dict(), {}
    for name, layer in layers(model).items():
        found[name] = (
            whole_of(state[f"{name}.weight"]).view(torch.uint8).clone(),
            state[f"{name}.weight_quant_scale"].clone(),
            whole_of(optimizer.master_of(layer.weight)).clone(),
        )
    return found


def saved(rank, world_size, ranks, recipe, folder):
    model, optimizer = started(ranks, recipe)
    one_step(model, optimizer)
    dcp.save(states_of(model, optimizer), checkpoint_id=folder)
    return facts(model, optimizer)


def loaded(rank, world_size, ranks, recipe, folder):
    model, optimizer = started(ranks, recipe, seed=5)
    states = states_of(model, optimizer)
    dcp.load(states, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=states["model"], optim_state_dict=states["optimizer"])
    found = facts(model, optimizer)
    one_step(model, optimizer)  # and it goes on
    return found


def equal(ours, theirs):
    return all(torch.equal(a, b) for name in theirs for a, b in zip(ours[name], theirs[name], strict=True))


LOADS = [((2, 2), (None, 4)), ((None, 2), (2, 2)), ((2, 2), None), ((4, 1), (2, 2)), ((None, 4), (1, 2))]


@pytest.mark.matrix("each", pair=LOADS, recipe=RECIPES)
def test_checkpoints_load_on_other_meshes(run_ranks, pair, recipe, tmp_path):
    source, target = pair
    folder = str(tmp_path / "checkpoint")
    wanted = run_ranks(world_of(source), saved, source, recipe, folder)[0]
    for found in run_ranks(1 if target is None else world_of(target), loaded, target, recipe, folder):
        assert equal(found, wanted)


def full_states(rank, world_size, ranks, recipe):
    model, optimizer = started(ranks, recipe)
    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    torch.save(full, io.BytesIO())
    whole, reference = started(None, recipe)
    complete = not full or all(
        torch.equal(full[name].reshape(-1).view(torch.uint8), value.reshape(-1).view(torch.uint8))
        for name, value in whole.state_dict().items()
    )
    other, _ = started(ranks, recipe, seed=5)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(other, full if rank == 0 else {}, options=options)
    exported = fti.export_fp32_state_dict(model, optimizer, full_tensors=True)
    values = fti.export_fp32_state_dict(whole, reference)
    same = all(torch.equal(exported[name], value) for name, value in values.items())
    return complete, has_slices_of(other, whole), same, fti.memory_report(model, optimizer).parameters


@pytest.mark.matrix("each", ranks=[(2, 2), (None, 2)], recipe=RECIPES[:3])
def test_full_state_dicts_and_exports_have_the_bits_of_the_unsharded_model(run_ranks, ranks, recipe):
    results = run_ranks(world_of(ranks), full_states, ranks, recipe)
    elements = sum(a * b for a, b in itertools.pairwise(widths(recipe)))
    for complete, unlike, same, _ in results:
        assert complete
        assert not unlike
        assert same
    assert sum(count for *_, count in results) == elements, "each element is held once"


# ---------------------------------------------------------------- refusals


def refused(rank, world_size):
    told = {}

    def note(name, action):
        with pytest.raises(Fp8Error) as caught:
            action()
        told[name] = str(caught.value)

    mesh = mesh_of((None, 2))["tp"]
    with fti.primary_weights("blockwise"):
        odd = nn.Linear(136, 136)
    note("blocks by rows", lambda: parallelize_module(odd, mesh, ColwiseParallel()))
    note("blocks by columns", lambda: parallelize_module(odd, mesh, RowwiseParallel()))
    with fti.primary_weights():
        replicated = nn.Linear(8, 8)
    replicated.weight = nn.Parameter(distribute_tensor(replicated.weight, mesh, [Replicate()]))
    note("a replicated weight", lambda: replicated(torch.ones(2, 8)))
    with fti.primary_weights():
        bare = nn.Linear(8, 8)
    bare.weight = nn.Parameter(distribute_tensor(bare.weight, mesh, [Shard(0)]))
    note("a plain input", lambda: bare(torch.ones(2, 8)))
    old = fti.MasterOptimizer(torch.optim.SGD, (late := net("tensorwise")).parameters(), lr=0.1)
    parallel(late, (None, 2))
    note("an optimizer of before", old.step)
    return told


def test_what_cannot_be_cut_or_computed_is_refused_on_all_ranks(run_ranks):
    for told in run_ranks(2, refused):
        assert "cut a weight (136, 136) every 68 rows, inside of the 128x128 blocks" in told["blocks by rows"]
        assert "every 68 columns" in told["blocks by columns"]
        assert "got a plain tensor" in told["a plain input"]
        assert "cannot compute with this distributed weight" in told["a replicated weight"]
        assert "parallelize_module" in told["an optimizer of before"]
