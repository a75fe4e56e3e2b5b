"""Tensor parallelism under hybrid sharding and with CPU offload: the numbers of plain weights that are cast."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import fp8_te_init as fti
from fp8_te_init._compat import local_of
from tests.helpers.parallel_twins import ParallelTwin

pytestmark = pytest.mark.distributed


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(24, 43), nn.Linear(43, 18)

    def forward(self, x):
        return self.down(torch.nn.functional.gelu(self.up(x)))


def hybrid():
    """Two replicas, each of which is tensor-parallel over two ranks."""
    return init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("replicate", "shard", "tp"))


def sharded():
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tp"))


def placed(model, mesh, **options):
    """Cut layers by rows and columns, then over the other dimensions of the mesh."""
    parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    names = mesh.mesh_dim_names[:-1]
    rest = mesh[names] if len(names) > 1 else mesh[names[0]]
    for module in (model.up, model.down, model):
        fully_shard(module, mesh=rest, **options)
    return model


WAYS = {"hybrid": (hybrid, {}), "offload": (sharded, {"offload_policy": CPUOffloadPolicy(pin_memory=False)})}


def trained(rank, world_size, way, recipe):
    """Return losses of both models, whether masters are the twin's weights, and codes their rounding."""
    make_mesh, options = WAYS[way]
    torch.manual_seed(0)
    twin = Net()
    torch.manual_seed(0)
    with fti.primary_weights(recipe):
        model = Net()
    for layer in (twin.up, twin.down):
        layer.__class__, layer.recipe = ParallelTwin, recipe
    placed(model, make_mesh(), **options)
    placed(twin, make_mesh(), **options)
    optimizer = fti.MasterOptimizer(torch.optim.AdamW, model.parameters(), lr=1e-2)
    reference = torch.optim.AdamW(twin.parameters(), lr=1e-2)
    fti.seed_masters(optimizer, model)
    losses = []
    for step in range(4):
        generator = torch.Generator().manual_seed(10 * step + rank // 2)
        x = torch.randn(16, 24, generator=generator)
        both = [(net(x) - 1).square().mean() for net in (model, twin)]
        for loss in both:
            loss.backward()
        for each in (optimizer, reference):
            each.step()
            each.zero_grad()
        losses.append([loss.item() for loss in both])
    same, rounded = [], []
    for mine, theirs in ((model.up, twin.up), (model.down, twin.down)):
        master, rows = local_of(optimizer.master_of(mine.weight)), local_of(mine.weight).quantized_rows
        same.append(torch.equal(master, local_of(theirs.weight)))
        rounded.append(torch.equal(rows.quantized(master), rows.codes()))
    return losses, all(same), all(rounded)


@pytest.mark.matrix("each", way=WAYS, recipe=["tensorwise", "rowwise"])
def test_training_has_the_bits_of_plain_weights_that_are_cast_at_each_forward(run_ranks, way, recipe):
    for losses, same, rounded in run_ranks(4, trained, way, recipe):
        assert all(ours == theirs for ours, theirs in losses), losses
        assert losses[-1][0] < losses[0][0]
        assert same, "masters are the twin's weights"
        assert rounded
