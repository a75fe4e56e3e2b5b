"""Experts that live on a part of the ranks: their scales are their own."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import fp8_torch_fsdp as f8

pytestmark = pytest.mark.distributed

RECIPES = ["tensorwise", "tensorwise_delayed", "rowwise"]


class Experts(nn.Module):
    """A dense layer on all ranks and experts, of which this rank has some, each with values of its own size."""

    def __init__(self, sizes):
        super().__init__()
        torch.manual_seed(0)
        self.dense = nn.Linear(16, 16, bias=False)
        self.experts = nn.ModuleList(nn.Linear(16, 16, bias=False) for _ in sizes)
        with torch.no_grad():
            for expert, size in zip(self.experts, sizes, strict=True):
                nn.init.uniform_(expert.weight, -size, size)

    def forward(self, x):
        return [expert(self.dense(x)) for expert in self.experts]


def errors(rank, world_size, recipe, sizes, shards):
    """Return the relative error of each expert of this rank in a third step; `shards` ranks share an expert."""
    mine = sizes[rank // shards]
    wanted, low = Experts(mine), f8.convert_to_float8_training(Experts(mine), recipe=recipe)
    mesh = init_device_mesh("cpu", (world_size // shards, shards), mesh_dim_names=("expert", "part"))
    for expert in low.experts:
        fully_shard(expert, mesh=mesh["part"])
    fully_shard(low, mesh=init_device_mesh("cpu", (world_size,)))
    optimizer = torch.optim.SGD(low.parameters(), lr=0.0, foreach=False)
    x = torch.randn(4, 16, generator=torch.Generator().manual_seed(1))
    for _ in range(2):
        sum(output.sum() for output in low(x)).backward()
        optimizer.step()
    with torch.no_grad():
        return [float((a - b).norm() / b.norm()) for a, b in zip(low(x), wanted(x), strict=True)]


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("sizes", [[[1e-5], [10.0]], [[1e-5, 1.0], [10.0]]], ids=["even", "uneven"])
def test_an_expert_of_one_rank_has_scales_of_its_own(run_ranks, recipe, sizes):
    for found in run_ranks(2, errors, recipe, sizes, 1):
        assert max(found) < 0.15


def test_an_expert_of_two_ranks_has_scales_of_its_own(run_ranks):
    for found in run_ranks(4, errors, "tensorwise", [[1e-5], [10.0]], 2):
        assert max(found) < 0.15
