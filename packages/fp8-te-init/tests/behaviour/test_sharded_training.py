"""Several ranks: training with FP8 weights, its bytes and reductions, and its checkpoints."""

import pytest
import torch
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import fp8_te_init as fti
from primary_facts import equal, masters
from tests.helpers.collectives import CollectiveCounter
from tests.helpers.primary_models import deep, masters_for, plain_deep
from tests.helpers.ranks import on_ranks
from tests.helpers.sharded_models import WIDTHS, batches, loss_of, mlp, shard
from tests.helpers.tensors import whole


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
@on_ranks(4)
def test_hybrid_shards_gather_and_train_the_bits_of_the_unsharded_model(rank, recipe):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model, twin = deep(recipe), deep(recipe)
    for module in (*model, model):
        fully_shard(module, mesh=mesh)
    state = {name: whole(value) for name, value in get_model_state_dict(model).items()}
    assert equal(state.values(), twin.state_dict().values())
    optimizers = [masters_for(net) for net in (model, twin)]
    for net, optimizer in zip((model, twin), optimizers, strict=True):
        loss_of(net, torch.ones(2, WIDTHS[0])).backward()
        optimizer.step()
    model.reshard()
    assert equal(map(whole, masters(model, optimizers[0])), masters(twin, optimizers[1]))


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
@on_ranks(2)
def test_what_is_gathered_stays_unchanged_when_its_shard_is_written_to(rank, recipe):
    model = shard(fti.convert_linear(plain_deep(widths=(24, 40, 60, 24)), recipe=recipe), 2)
    own = model[-1].weight
    model.unshard()
    before = model[-1].weight.dequantize()
    with torch.no_grad():
        own.mul_(2)
    assert torch.equal(model[-1].weight.dequantize(), before)
    model.reshard()
    model.unshard()
    assert torch.equal(model[-1].weight.dequantize(), 2 * before)


@on_ranks(2)
def test_a_gather_sends_one_byte_per_element_and_the_forward_reduces_nothing(rank):
    share, last = (24 * 40 + 40 * 60 + 60 * 24) // 2, 60 * 24 // 2
    model = shard(fti.convert_linear(mlp((24, 40, 60, 24), bias=False)), 2)
    optimizer = masters_for(model, torch.optim.AdamW, lr=1e-2)
    for x in batches(rank, 3):
        with CollectiveCounter() as forward:
            loss_of(model, x).backward()
        with CollectiveCounter() as step:
            optimizer.step()
        optimizer.zero_grad()
        assert set(forward.dtypes("all_gather")) == {torch.uint8}
        # forward and backward; the root keeps what it gathered
        assert sum(one.elements for one in forward.of("all_gather")) == 2 * share - last
        assert forward.of("all_reduce") == []
        sent = [(one.dtype, one.elements) for one in step.of("all_reduce")]
        assert sent == [(torch.int32, 3)], "a number for each weight"
