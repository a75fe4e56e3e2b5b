"""Delayed scaling under DDP: replicas combine what they observe when they are told to, and are warned if not."""

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import fp8_torch_fsdp as f8
from tests.helpers.fsdp_models import Block, converted, seeded
from tests.helpers.fsdp_training import batch

pytestmark = pytest.mark.distributed


def train(rank, world_size):
    """Return the error of outputs for this rank's batches, on rank 1 100 times larger, and a history."""
    ddp = DistributedDataParallel(converted(seeded(Block), "tensorwise_delayed"))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.0)
    for step in range(4):
        for last in (False, True):
            ddp.require_backward_grad_sync = last  # what no_sync() sets
            ddp(100.0**rank * batch(rank, step)).sum().backward()
        optimizer.step()
        if step < 3:
            f8.synchronize_scales(ddp.module, group=dist.group.WORLD)
        if step == 2:
            x = 100.0**rank * batch(rank, 2)
            with torch.no_grad():
                error = (ddp.module(x) - seeded(Block)(x)).norm() / seeded(Block)(x).norm()  # one rank may evaluate
            history = ddp.module.up.fp8_input.history.tolist()
    with pytest.warns(UserWarning, match="what it has observed alone"):
        ddp(batch(rank))
    return float(error), history


def test_replicas_combine_what_they_observe_and_are_warned_if_they_are_not_told_to(run_ranks):
    (first, one), (last, other) = run_ranks(2, train)
    assert one == other
    assert max(first, last) < 0.15
