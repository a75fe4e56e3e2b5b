"""Delayed scaling under DDP: replicas combine what they observe by themselves, or say that they cannot."""

import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import fp8_torch_fsdp as f8
from fp8_torch_fsdp._compat import replicating_ddp

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
        assert (model[0].fp8_input.own_key < 0).all(), "all that is known is known to all, and can be saved"
        optimizer.step()
    x, wanted = batch(rank, 2), build()
    with torch.no_grad():
        error = (model(x) - wanted(x)).norm() / wanted(x).norm()  # one rank alone may evaluate
    return float(error), model[0].fp8_input.history.tolist()


@pytest.mark.parametrize("microbatches", [1, 2])
def test_replicas_combine_what_they_observe(run_ranks, microbatches):
    (first, one), (last, other) = run_ranks(2, train, microbatches)
    assert one == other
    assert max(first, last) < 0.15


def evaluate_on_one_rank(rank, world_size):
    model = f8.convert_to_float8_training(build(), recipe="tensorwise_delayed")
    ddp = DistributedDataParallel(model, broadcast_buffers=False)
    for _ in range(2):
        ddp(batch(rank, 0)).sum().backward()
        if rank == 0:
            with torch.no_grad():
                ddp(batch(rank, 0))
    with ddp.join():  # rank 1 has more batches
        for _ in range(2 + rank):
            ddp(batch(rank, 0)).sum().backward()
    return replicating_ddp() is None


def test_one_rank_may_evaluate_or_run_out_of_batches(run_ranks):
    assert run_ranks(2, evaluate_on_one_rank) == [True, True]


def convert_a_part(rank, world_size, unused):
    model = nn.Sequential(build(), nn.Linear(8, 4))
    f8.convert_to_float8_training(model[0], recipe="tensorwise_delayed")
    ddp = DistributedDataParallel(model, find_unused_parameters=unused)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ddp(batch(rank, 0)).sum().backward()
    combined = bool((model[0][0].fp8_input.own_key < 0).all())
    return combined, [str(w.message) for w in caught if "FP8" in str(w.message)]


def test_a_part_that_ranks_may_leave_out_warns(run_ranks):
    assert run_ranks(2, convert_a_part, False) == [(True, [])] * 2
    for combined, messages in run_ranks(2, convert_a_part, True):
        assert not combined
        assert len(messages) == 1
        assert "each rank scales by what it sees alone" in messages[0]


def edit_on_one_rank(rank, world_size):
    """Replicas without DDP, whose ranks are named in the call; rank 1 makes a weight 64 times larger."""
    model = f8.convert_to_float8_training(build(), recipe="tensorwise_delayed")
    seen = []
    for step in range(4):
        model(batch(0, step)).sum().backward()
        if step == 2 and rank == 1:
            with torch.no_grad():
                model[0].weight.mul_(64)
        f8.synchronize_scales(model, group=dist.group.WORLD)
        seen.append([float(layer.fp8_weight.scale) for layer in (model[0], model[2])])
    return seen


def test_an_edit_on_one_rank_reaches_the_ranks_that_are_named(run_ranks):
    one, other = run_ranks(2, edit_on_one_rank)
    assert one == other
    before, after = one[1], one[2]
    assert after == [before[0] / 64, before[1]], "the scale follows the edited weight at once, the other stays"
