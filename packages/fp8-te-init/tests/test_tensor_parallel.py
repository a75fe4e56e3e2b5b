"""Tensor-parallel FP8 weights under torch's own styles, alone and under FSDP2: the numbers of the unsharded weight."""

import io

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
from fp8_te_init._shards import place_of

pytestmark = pytest.mark.distributed

RECIPES = ("tensorwise", "rowwise", "blockwise", "tensorwise_delayed")
# (data-parallel ranks or None for tensor parallelism alone, tensor-parallel ranks)
MESHES = [(None, 2), (None, 4), (2, 2), (4, 1), (1, 2)]


def widths(recipe):
    """Uneven over two and four ranks, where blocks allow it."""
    return (24, 512, 136) if recipe == "blockwise" else (24, 43, 18)


class Net(nn.Module):
    def __init__(self, sizes, dtype=torch.float32):
        super().__init__()
        self.up, self.down = nn.Linear(*sizes[:2], dtype=dtype), nn.Linear(*sizes[1:], dtype=dtype)

    def forward(self, x):
        return self.down(torch.nn.functional.gelu(self.up(x)))


def net(recipe, preserve="cpu", dtype=torch.float32, seed=0, device="cpu", **options):
    torch.manual_seed(seed)
    with torch.device(device), fti.primary_weights(recipe, preserve=preserve, **options):
        return Net(widths(recipe), dtype)


def mesh_of(ranks):
    dp, tp = ranks
    if dp is None:
        return init_device_mesh("cpu", (tp,), mesh_dim_names=("tp",))
    return init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp", "tp"))


def parallel(model, ranks, **options):
    mesh = mesh_of(ranks)
    plan = {"up": ColwiseParallel(**options), "down": RowwiseParallel(**options)}
    parallelize_module(model, mesh["tp"], plan)
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
        wanted = reference.state.codes[place_of(layer.weight).inside()]
        if not torch.equal(primary.quantized_rows.codes(), wanted):
            unlike.append(f"codes of {name}")
        if not torch.equal(primary.scale, reference.scale):
            unlike.append(f"scale of {name}")
    return unlike


def slice_of(whole, like):
    return whole[place_of(like).inside()]


# ---------------------------------------------------------------- codes, masters, steps


def cut_and_stepped(rank, world_size, ranks, recipe, dtype):
    model, whole = parallel(net(recipe, dtype=dtype), ranks), net(recipe, dtype=dtype)
    unlike = [has_slices_of(model, whole)]
    options = {"lr": 1e-2, "round_through_dtype": dtype == torch.bfloat16}
    optimizer, reference = (fti.MasterOptimizer(torch.optim.AdamW, m.parameters(), **options) for m in (model, whole))
    report = fti.seed_masters(optimizer, model)
    fti.seed_masters(reference, whole)
    masters = [
        torch.equal(local_of(optimizer.master_of(mine.weight)), slice_of(reference.master_of(theirs.weight), mine.weight))
        for mine, theirs in zip(layers(model).values(), layers(whole).values(), strict=True)
    ]
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        for (_, mine), (_, theirs) in zip(model.named_parameters(), whole.named_parameters(), strict=True):
            theirs.grad = torch.randn(theirs.shape, generator=generator).to(dtype)
            placed = isinstance(mine, DTensor)
            mine.grad = distribute_like(theirs.grad, mine) if placed else theirs.grad.clone()
        optimizer.step()
        reference.step()
        unlike.append(has_slices_of(model, whole))
    exact = all(
        torch.equal(whole_of(optimizer.master_of(mine.weight)), reference.master_of(theirs.weight))
        for mine, theirs in zip(layers(model).values(), layers(whole).values(), strict=True)
    )
    return unlike, masters, set(report.sources.values()), exact, optimizer.reductions


def distribute_like(value, like):
    """Return a DTensor of any placements, FSDP2's on top of tensor parallelism too, from a whole tensor."""
    own = slice_of(value, like).clone()
    return DTensor.from_local(
        own, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def whole_of(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@pytest.mark.matrix(ranks=MESHES[:3], recipe=RECIPES, dtype=[torch.float32, torch.bfloat16])
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
    """Return whether masters of every kind of start are the slices of the unsharded model's."""
    whole, reference = net(recipe, dtype=torch.bfloat16), None
    preserve = source if source in ("cpu", "residual", "replay") else "none"
    model = net(recipe, preserve, torch.bfloat16)
    options, expected = {}, None
    if source in ("plain", "file", "folder", "distributed", "fp8"):
        torch.manual_seed(5)
        other = Net(widths(recipe))
        expected = {name: layer.weight.detach().clone() for name, layer in layers(other).items()}
        options["checkpoint"] = checkpoint_of(other, source, recipe, folder, rank, ranks)
        if source == "fp8":
            fti.convert_linear(other, recipe=recipe, preserve="none")
            expected = {name: layer.weight.state.own_values() for name, layer in layers(other).items()}
        parallel(model, ranks)
    elif source == "philox":
        parallel(model, ranks)
        model, whole = (
            fti.philox_init_model_(m, lambda name, p: fti.Normal(std=0.02) if p.ndim == 2 else None, seed=3)
            for m in (model, whole)
        )
        options.update(strict=False, source_order=("copy",)) if False else None
    elif source == "dither":
        parallel(model, ranks)
        options.update(strict=False, source_order=("dither",), seed=3)
    else:
        parallel(model, ranks)
    optimizer = fti.MasterOptimizer(torch.optim.SGD, model.parameters(), lr=0.1)
    if expected is None:
        reference = fti.MasterOptimizer(torch.optim.SGD, whole.parameters(), lr=0.1)
        fti.seed_masters(reference, whole, **options)
        expected = {name: reference.master_of(layer.weight) for name, layer in layers(whole).items()}
    if source == "philox":
        options.update(strict=False, source_order=("dequant",))
    report = fti.seed_masters(optimizer, model, **options)
    same = {
        name: torch.equal(
            local_of(optimizer.master_of(layer.weight)).float(), slice_of(expected[name].float(), layer.weight)
        )
        for name, layer in layers(model).items()
    }
    return same, set(report.sources.values()), sum(cell.nbytes for *_, cell in named_kept(model))


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


SOURCES = ["cpu", "residual", "replay", "plain", "file", "folder", "distributed", "fp8", "philox", "dither"]


@pytest.mark.matrix(source=SOURCES, ranks=[(None, 2), (2, 2)], recipe=["tensorwise", "rowwise", "blockwise"])
def test_every_source_gives_the_columns_and_rows_that_are_held_here(run_ranks, source, ranks, recipe, tmp_path):
    for same, sources, left in run_ranks(world_of(ranks), from_source, ranks, recipe, source, str(tmp_path)):
        assert all(same.values()), same
        assert len(sources) == 1
        assert left == 0, "nothing is kept after masters were seeded"


# ---------------------------------------------------------------- training


def trained(rank, world_size, ranks, recipe, dtype):
    """Return losses of an FP8 model, of plain weights that are cast at each forward, and whether they end alike."""
    model = parallel(net(recipe, dtype=dtype), ranks)
    twin = parallel(twin_of(net(recipe, dtype=dtype), recipe, dtype), ranks)
    low = dtype == torch.bfloat16
    optimizer = fti.MasterOptimizer(torch.optim.AdamW, model.parameters(), lr=1e-2, round_through_dtype=low)
    make = (lambda p: fti.MasterOptimizer(torch.optim.AdamW, p, lr=1e-2)) if low else None
    reference = make(twin.parameters()) if make else torch.optim.AdamW(twin.parameters(), lr=1e-2)
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
    model.eval()
    same = all(
        torch.equal(local_of(optimizer.master_of(mine.weight)), local_of(trains(reference, theirs.weight)))
        for mine, theirs in zip(layers(model).values(), layers(twin).values(), strict=True)
    )
    return losses, same


def trains(optimizer, parameter):
    return optimizer.master_of(parameter) if isinstance(optimizer, fti.MasterOptimizer) else parameter


class TwinLinear(nn.Linear):
    """Plain weights; each forward casts the whole weight and multiplies this rank's part of the codes."""

    recipe: str

    def forward(self, x):
        layer = fti.convert_linear(nn.Linear(self.in_features, self.out_features, bias=False), recipe=self.recipe)
        whole = self.weight.full_tensor().detach().to(self.weight.dtype)
        layer.weight.state.write(whole)
        part = Part.apply(self.weight, layer.weight)
        return parallel_linear(layer._local_product, x, part, self.bias)


class Part(torch.autograd.Function):
    """This rank's part of a whole FP8 weight in the place of a plain part; its gradient goes to the plain one."""

    @staticmethod
    def forward(ctx, plain, whole):
        ctx.placements = plain.placements
        return cut(whole, plain.detach(), None)

    @staticmethod
    def backward(ctx, grad):
        return grad, None


def twin_of(model, recipe, dtype):
    torch.manual_seed(0)
    twin = Net(widths(recipe), dtype)
    for layer in layers(twin).values():
        layer.__class__, layer.recipe = TwinLinear, recipe
    return twin
