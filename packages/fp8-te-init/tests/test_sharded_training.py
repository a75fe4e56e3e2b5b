"""Several ranks: training with FP8 weights, its bytes and reductions, and its checkpoints."""

import pytest
import torch
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import fp8_te_init as fti
from tests.helpers.collectives import CollectiveCounter
from tests.helpers.primary_facts import equal, masters, whole
from tests.helpers.primary_models import deep, masters_for
from tests.helpers.sharded_models import WIDTHS, batches, loss_of, mlp, shard

pytestmark = pytest.mark.distributed


def hybrid(rank, world_size, recipe):
    mesh = init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=("replicate", "shard"))
    model, twin = deep(recipe), deep(recipe)
    for module in (*model, model):
        fully_shard(module, mesh=mesh)
    state = {name: whole(value) for name, value in get_model_state_dict(model).items()}
    found = [equal(state.values(), twin.state_dict().values())]
    optimizers = []
    for net in (model, twin):
        optimizers.append(masters_for(net))
        loss_of(net, torch.ones(2, WIDTHS[0])).backward()
        optimizers[-1].step()
    model.reshard()
    return [*found, equal(map(whole, masters(model, optimizers[0])), masters(twin, optimizers[1]))]


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_hybrid_shards_gather_and_train_the_bits_of_the_unsharded_model(run_ranks, recipe):
    assert run_ranks(4, hybrid, recipe) == [[True, True]] * 4


def kept_over_a_write(rank, world_size, recipe):
    model = shard(fti.convert_linear(mlp((24, 40, 60, 24), bias=False), recipe=recipe), world_size)
    own = model[-1].weight
    model.unshard()
    before = model[-1].weight.dequantize()
    with torch.no_grad():
        own.mul_(2)
    kept = torch.equal(model[-1].weight.dequantize(), before)
    model.reshard()
    model.unshard()
    return kept, torch.equal(model[-1].weight.dequantize(), 2 * before)


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_what_is_gathered_stays_as_it_is_when_its_shard_is_written_to(run_ranks, recipe):
    assert run_ranks(2, kept_over_a_write, recipe) == [(True, True)] * 2


def collectives_of_steps(rank, world_size):
    model = shard(fti.convert_linear(mlp((24, 40, 60, 24), bias=False)), world_size)
    optimizer, seen = masters_for(model, torch.optim.AdamW, lr=1e-2), []
    for x in batches(rank, 3):
        with CollectiveCounter() as forward:
            loss_of(model, x).backward()
        with CollectiveCounter() as step:
            optimizer.step()
        optimizer.zero_grad()
        seen.append((forward.of("all_gather"), forward.of("all_reduce"), step.of("all_reduce")))
    return seen


def test_a_gather_sends_one_byte_per_element_and_the_forward_reduces_nothing(run_ranks):
    share, last = (24 * 40 + 40 * 60 + 60 * 24) // 2, 60 * 24 // 2
    for steps in run_ranks(2, collectives_of_steps):
        for gathers, reductions, in_step in steps:
            assert {one.dtype for one in gathers} == {torch.uint8}
            # forward and backward; the root keeps what it gathered
            assert sum(one.elements for one in gathers) == 2 * share - last
            assert reductions == []
            assert [(one.dtype, one.elements) for one in in_step] == [(torch.int32, 3)], "a number for each weight"
