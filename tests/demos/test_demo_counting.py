"""The demo's counts come from the collectives: what is issued is seen, in forward, backward and from a subclass."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from demos.torch_fsdp.counting import LINEAR, OTHER, CollectiveCounter, gather_tensor, label_gathers
from demos.torch_fsdp.model import Block, ByteModel, loss_of

DIM, LAYERS, LENGTH = 32, 2, 16
LINEAR_WEIGHTS = LAYERS * 12 * DIM * DIM
OTHER_WEIGHTS = 2 * 256 * DIM


def count_gathers(rank: int, world_size: int) -> dict:
    tensor = torch.arange(6.0)
    gathered = torch.empty(6 * world_size)
    counter = CollectiveCounter()
    with counter:
        gather_tensor(gathered, tensor)
        with counter.labelled(LINEAR):
            dist.all_gather([torch.empty(6) for _ in range(world_size)], tensor)
        functional.all_gather_tensor(tensor, 0, dist.group.WORLD).wait()
    return counter.received


def count_all_reduces(rank: int, world_size: int) -> int:
    whole, real = torch.ones(3, dtype=torch.int32), torch.ones(3)
    counter = CollectiveCounter()
    with counter:
        dist.all_reduce(whole, op=dist.ReduceOp.MAX)
        functional.all_reduce(whole, "max", dist.group.WORLD).wait()
        for tensor, op in [(whole, "SUM"), (whole, "MIN"), (real, "MAX"), (real, "SUM")]:
            dist.all_reduce(tensor, op=getattr(dist.ReduceOp, op))
        functional.all_reduce(whole, "sum", dist.group.WORLD).wait()
    dist.all_reduce(whole, op=dist.ReduceOp.MAX)
    return counter.amax_all_reduces


def count_training_step(rank: int, world_size: int) -> dict:
    mesh = init_device_mesh("cpu", (world_size,))
    model = ByteModel(DIM, LAYERS, LENGTH)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    counter = CollectiveCounter()
    label_gathers(model, counter)
    codes = torch.zeros(2, LENGTH, dtype=torch.int64)
    with counter:
        loss_of(model(codes), codes).backward()
    return counter.received


@pytest.mark.distributed
@pytest.mark.parametrize("world_size", [2, 3])
def test_every_way_to_gather_is_seen(run_ranks, world_size):
    from_others = 24 * (world_size - 1)
    for received in run_ranks(world_size, count_gathers):
        assert received == {LINEAR: from_others, OTHER: 2 * from_others}


@pytest.mark.distributed
def test_only_int32_max_all_reduces_are_amax_all_reduces(run_ranks):
    assert run_ranks(2, count_all_reduces) == [2, 2]


@pytest.mark.distributed
def test_fsdp_gathers_of_forward_and_backward_are_seen_and_told_apart(run_ranks):
    # Blocks are gathered again in the backward pass, the root is not; bf16 is 2 bytes, half of them from the other.
    expected = {LINEAR: 2 * LINEAR_WEIGHTS * 2 // 2, OTHER: OTHER_WEIGHTS * 2 // 2}
    assert run_ranks(2, count_training_step) == [expected, expected]


def test_a_block_with_other_parameters_is_refused():
    model = nn.Sequential(Block(DIM))
    model[0].norm = nn.LayerNorm(DIM)
    with pytest.raises(RuntimeError, match=r"linear weights alone .* \['norm.weight', 'norm.bias'\]"):
        label_gathers(model, CollectiveCounter())
