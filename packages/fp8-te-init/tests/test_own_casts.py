"""Several ranks: rows and blocks of one rank alone are cast once, and the ranks then tell each other the scales."""

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import fp8_te_init as fti
from fp8_common import get_recipe, quantize_blockwise, quantize_rowwise
from fp8_te_init._weight import primary_of
from tests.helpers.collectives import CollectiveCounter

pytestmark = pytest.mark.distributed

# rows of weights: of which ranks hold unequal numbers, and some none; blocks whole on each rank, and blocks cut
ROWS = {"rowwise": (2, 5, 7, 40), "blockwise": (3, 100, 128, 384, 512, 300)}
WIDTH = 130


def values_of(rows):
    values = torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(rows))
    values[0] = 0
    values[-1, :2] = torch.tensor([torch.nan, torch.inf])
    values[rows // 2] *= 1e-42
    values[rows // 3, 1] = -torch.inf
    return values


def defined(values, cast):
    if cast.granularity == "rowwise":
        codes, scale = quantize_rowwise(values, cast.format, policy=cast.policy)
    else:
        codes, scale = quantize_blockwise(values, cast.format, block=(128, 128), policy=cast.policy)
    return plain(codes.view(np.uint8)), scale


def plain(codes):
    return np.where(codes & 0x7F == 0x7F, 0x7F, codes)  # any NaN is as good as any other


def written_back(rank, world_size, recipe):
    model = nn.Sequential(*(nn.Linear(WIDTH, rows, bias=False) for rows in ROWS[recipe]))
    model = fti.convert_linear(model, recipe=recipe)
    cast = get_recipe(recipe).weight
    fully_shard(model, mesh=init_device_mesh("cpu", (world_size,)))
    optimizer = fti.MasterOptimizer(torch.optim.SGD, model.parameters(), lr=0.1)
    parameters = list(model.parameters())
    for parameter in parameters:
        primary = primary_of(parameter)
        optimizer.set_master(parameter, values_of(parameter.shape[0])[primary.state.place.inside()])
    with CollectiveCounter() as step:
        optimizer.write_back(step=True)
    problems = []
    for parameter in parameters:
        rows = parameter.shape[0]
        state = primary_of(parameter).state
        codes, scale = defined(values_of(rows).numpy(), cast)
        if not np.array_equal(plain(state.own_codes.numpy()), codes[state.place.inside()]):
            problems.append(f"codes of {rows} rows")
        if not np.array_equal(state.scale.view(torch.int32).numpy().ravel(), scale.view(np.int32).ravel()):
            problems.append(f"scales of {rows} rows")
        if state.scale.untyped_storage().nbytes() != state.scale.nbytes:
            problems.append(f"scales of {rows} rows are a part of what was reduced, which a pickle would hold")
    return problems, len(step.of("all_reduce"))


@pytest.mark.parametrize("recipe", ROWS)
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_codes_and_scales_are_those_of_the_whole_weight(run_ranks, world_size, recipe):
    for problems, reductions in run_ranks(world_size, written_back, recipe):
        assert problems == []
        assert reductions == (world_size > 1)


def casts(rank, world_size, recipe):
    found = {}
    for rows in ROWS[recipe]:
        model = fti.convert_linear(nn.Sequential(nn.Linear(WIDTH, rows, bias=False)), recipe=recipe)
        fully_shard(model, mesh=init_device_mesh("cpu", (world_size,)))
        weight = primary_of(next(model.parameters()))
        own = weight.quantized_rows.cast_own(torch.ones(weight.state.rows, WIDTH), dist.get_world_size())
        found[rows] = own is not None
    return found


@pytest.mark.parametrize(
    ("recipe", "world_size", "shared"),
    [
        ("rowwise", 3, ()),
        ("rowwise", 4, ()),
        ("blockwise", 2, (3, 100, 128, 384, 300)),
        ("blockwise", 3, (3, 100, 128, 512, 300)),
    ],
)
def test_all_ranks_say_alike_whether_they_share_scales(run_ranks, recipe, world_size, shared):
    alone = {rows: rows not in shared for rows in ROWS[recipe]}
    assert run_ranks(world_size, casts, recipe) == [alone] * world_size
