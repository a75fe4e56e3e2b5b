"""Delayed scaling under DDP: replicas combine what they observe when they are told to, and are warned if not."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import fp8_torch_fsdp as f8

pytestmark = pytest.mark.distributed


def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 8))


def batch(rank, step):
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(4, 16, generator=generator) * 100.0**rank


def train(rank, world_size, microbatches):
    """Return the error of outputs for this rank's batches, on rank 1 100 times larger, and a history."""
    model = f8.convert_to_float8_training(build(), recipe="tensorwise_delayed")
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.0)
    for step in range(3):
        for microbatch in range(microbatches):
            ddp.require_backward_grad_sync = microbatch == microbatches - 1  # what no_sync() sets
            ddp(batch(rank, step)).sum().backward()
        optimizer.step()
        f8.synchronize_scales(model, group=dist.group.WORLD)
    x, wanted = batch(rank, 2), build()
    with torch.no_grad():
        error = (model(x) - wanted(x)).norm() / wanted(x).norm()  # one rank alone may evaluate
    return float(error), model[0].fp8_input.history.tolist()


@pytest.mark.parametrize("microbatches", [1, 2])
def test_replicas_combine_what_they_observe(run_ranks, microbatches):
    (first, one), (last, other) = run_ranks(2, train, microbatches)
    assert one == other
    assert max(first, last) < 0.15


def forget(rank, world_size):
    ddp = DistributedDataParallel(f8.convert_to_float8_training(build(), recipe="tensorwise_delayed"))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.0)
    ddp(batch(rank, 0)).sum().backward()
    optimizer.step()
    with pytest.warns(UserWarning, match="what it has observed alone"):
        ddp(batch(rank, 1))


def test_replicas_that_are_not_told_to_combine_are_warned(run_ranks):
    assert run_ranks(2, forget) == [None, None]
