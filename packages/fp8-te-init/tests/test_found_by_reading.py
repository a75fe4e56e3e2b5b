"""Defects that were found by reading the code: what waits for a scale, large places, other distributions, aliases."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

import fp8_te_init as fti
from fp8_common import CastRecipe
from fp8_te_init._backends.te_hooks import _post_all_gather
from fp8_te_init._rows import Rows
from fp8_te_init._sources import ResidualSource
from fp8_te_init._sources.residual import place_dtype

WHOLE = torch.Size([6, 4])


def shard_of(rank):
    weight = fti.PrimaryFloat8Weight.empty(WHOLE, CastRecipe(), dtype=torch.float32, device=torch.device("cpu"))
    weight.state.sharded = True  # replicas of one shard: other ranks, not here, hold other rows
    return weight


def broadcast_over_what_waits(rank, world_size, sender_waits):
    """Return what waits for a scale after a broadcast, and what was sent."""
    weight = shard_of(rank)
    sent = torch.arange(24.0).view(WHOLE) + 1
    if rank == 0 and sender_waits:
        weight.copy_(sent)
    if rank == 1:
        weight.copy_(-torch.ones(WHOLE))
    dist.broadcast(weight, 0)
    return weight.quantized_rows.pending(), sent, weight.state.unagreed


@pytest.mark.distributed
@pytest.mark.parametrize("sender_waits", [True, False])
def test_values_that_waited_for_a_scale_are_gone_after_a_broadcast(run_ranks, sender_waits):
    for waiting, sent, unagreed in run_ranks(2, broadcast_over_what_waits, sender_waits):
        assert unagreed is sender_waits
        assert torch.equal(waiting, sent) if sender_waits else waiting is None


def test_places_in_large_weights_have_64_bits():
    assert (place_dtype(1 << 31), place_dtype((1 << 31) + 1)) == (torch.int32, torch.int64)
    rows, columns = 1 << 20, 1 << 12
    residual = torch.zeros(1, 1, dtype=torch.int8).expand(rows, columns)
    places = torch.tensor([5, (rows - 1) * columns + 7], dtype=place_dtype(rows * columns))
    source = ResidualSource(residual, (places, torch.tensor([1.0, 2.0]).bfloat16()), bytes(8 * rows), Rows(0, rows))
    last = source.narrowed(Rows(rows - 2, rows))
    place, value = last._escapes
    assert (place.tolist(), place.dtype, value.tolist()) == ([columns + 7], torch.int32, [2.0])


def start_from_another_mesh(rank, world_size):
    """Seed an HSDP model of few rows from tensors over all ranks: some ranks hold the very rows that they need."""
    torch.manual_seed(0)
    plain, layer = nn.Linear(8, 1, bias=False), fti.convert_linear(nn.Linear(8, 1, bias=False))
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    fully_shard(layer, mesh=mesh)
    optimizer = fti.MasterOptimizer(torch.optim.SGD, layer.parameters(), lr=0.1)
    values = distribute_tensor(plain.weight.detach(), init_device_mesh("cpu", (4,)), [Shard(0)])
    fti.seed_masters(optimizer, layer, checkpoint={"weight": values})
    return torch.equal(optimizer.master_of(layer.weight).full_tensor(), plain.weight)


@pytest.mark.distributed
def test_a_checkpoint_over_another_mesh_is_gathered_by_all_ranks(run_ranks):
    assert run_ranks(4, start_from_another_mesh) == [True] * 4


def test_what_fsdp_is_told_to_free_is_not_the_gathered_buffer():
    class Tensor:
        _fp8_dtype = _quantizer = None

        def __init__(self, **fields):
            self.fields = fields

    buffer = torch.arange(24, dtype=torch.uint8).view(8, 3)  # 7 rows over two ranks
    whole, freed = _post_all_gather(Tensor(), (buffer,), (torch.ones(1), torch.Size([7, 3])), torch.float32)
    assert torch.equal(whole.fields["data"], buffer[:7])
    addresses = {tensor.untyped_storage().data_ptr() for tensor in freed}
    assert buffer.untyped_storage().data_ptr() not in addresses


def test_copies_of_aliases_are_aliases():
    layer = fti.convert_linear(nn.Linear(4, 6, bias=False))
    weight, alias = copy.deepcopy([layer.weight, layer.weight.detach()])
    assert weight.state is alias.state
    assert weight.state is not layer.weight.state
    with torch.no_grad():
        alias.fill_(2.0)
    assert weight.dequantize().eq(2).all()
    memo = {}
    assert layer.weight.__deepcopy__(memo) is layer.weight.__deepcopy__(memo)
