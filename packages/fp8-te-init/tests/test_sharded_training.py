"""Several ranks: training with FP8 weights, its bytes and reductions, and its checkpoints."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import fp8_te_init as fti
from fp8_common import Fp8Error, get_recipe
from tests.helpers.collectives import CollectiveCounter
from tests.helpers.sharded_models import WIDE, WIDTHS, batches, loss_of, mlp, shard, train

pytestmark = pytest.mark.distributed

RECIPES = ["tensorwise", "tensorwise_delayed", "rowwise", "blockwise"]
STEPS = 20


def built(recipe, dtype=torch.float32, widths=WIDTHS) -> nn.Sequential:
    torch.manual_seed(0)
    model = mlp(widths, dtype=dtype)
    return fti.convert_linear(model, config=fti.LinearConfig(recipe=get_recipe(recipe)))


def optimizer_for(model):
    optimizer = fti.MasterOptimizer(torch.optim.AdamW, model.parameters(), lr=1e-2)
    fti.seed_masters(optimizer, model)
    return optimizer


def whole_masters(model, optimizer):
    masters = [optimizer.master_of(layer.weight) for layer in model]
    return [master.full_tensor() if hasattr(master, "full_tensor") else master for master in masters]


def sharded_and_replicated(rank, world_size, recipe, widths):
    sharded = shard(built(recipe, widths=widths), world_size)
    optimizer = optimizer_for(sharded)
    losses = train(sharded, optimizer, rank, STEPS)

    twin = built(recipe, widths=widths)
    reference = optimizer_for(twin)
    expected = []
    for x in batches(rank, STEPS):
        loss = loss_of(twin, x)
        loss.backward()
        for parameter in twin.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad.div_(world_size)
        reference.step()
        reference.zero_grad()
        expected.append(loss.item())
    pairs = zip(whole_masters(sharded, optimizer), whole_masters(twin, reference), strict=True)
    return losses == expected, all(torch.equal(a, b) for a, b in pairs)


# the ranks' rows of the wide layers meet inside a block
@pytest.mark.parametrize(("recipe", "widths"), [*((recipe, WIDTHS) for recipe in RECIPES), ("blockwise", WIDE)])
def test_twenty_steps_equal_a_replicated_model(run_ranks, recipe, widths):
    assert run_ranks(2, sharded_and_replicated, recipe, widths) == [(True, True)] * 2


def collectives_of_steps(rank, world_size):
    model = fti.convert_linear(mlp((24, 40, 60, 24), bias=False))
    mesh = init_device_mesh("cpu", (world_size,))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = optimizer_for(model)
    seen = []
    for x in batches(rank, 3):
        with CollectiveCounter() as forward:
            loss_of(model, x).backward()
        with CollectiveCounter() as step:
            optimizer.step()
        optimizer.zero_grad()
        seen.append((forward.of("all_gather"), forward.of("all_reduce"), step.of("all_reduce")))
    return seen


def test_a_gather_sends_one_byte_per_element_and_the_forward_reduces_nothing(run_ranks):
    share = (24 * 40 + 40 * 60 + 60 * 24) // 2
    for steps in run_ranks(2, collectives_of_steps):
        for gathers, reductions, in_step in steps:
            assert {one.dtype for one in gathers} == {torch.uint8}
            assert sum(one.elements for one in gathers) == 2 * share, "forward and backward"
            assert reductions == []
            assert [one.dtype for one in in_step] == [torch.int32]
            assert in_step[0].elements == 3, "one number for each weight"


def save_sharded(rank, world_size, folder, recipe):
    model = shard(built(recipe), world_size)
    optimizer = optimizer_for(model)
    train(model, optimizer, rank, 3)
    state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.save(state, checkpoint_id=folder)
    return bits_of(model, optimizer)


def load_sharded(rank, world_size, folder, recipe):
    torch.manual_seed(99)
    model = shard(fti.convert_linear(mlp(), recipe=recipe, preserve_high_precision_init_val=False), world_size)
    optimizer = fti.MasterOptimizer(torch.optim.AdamW, model.parameters(), lr=1e-2)
    of_model, of_optimizer = get_state_dict(model, optimizer)
    state = {"model": of_model, "optimizer": of_optimizer}
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    bits = bits_of(model, optimizer)
    train(model, optimizer, rank, 2)
    return bits


def bits_of(model, optimizer):
    """Codes, scales, masters and moments of the whole model."""
    bits = []
    for layer in model:
        local = layer.weight.to_local()
        master = optimizer.master_of(layer.weight)
        values = [master, *(v for v in optimizer.inner.state[master].values() if v.ndim)]
        bits += [value.full_tensor().clone() for value in values]
        parts = [None] * dist.get_world_size()
        dist.all_gather_object(parts, local.state.own_codes)
        bits += [torch.cat(parts), local.state.scale.clone()]
    return bits


@pytest.mark.matrix(save_with=[2, 3], load_with=[1, 2, 4], recipe=["tensorwise", "tensorwise_delayed", "blockwise"])
def test_checkpoints_come_back_bit_for_bit_on_any_number_of_ranks(run_ranks, tmp_path, save_with, load_with, recipe):
    saved = run_ranks(save_with, save_sharded, str(tmp_path), recipe)
    loaded = run_ranks(load_with, load_sharded, str(tmp_path), recipe)
    for bits in [*saved, *loaded]:
        assert all(torch.equal(a, b) for a, b in zip(bits, saved[0], strict=True))


def load_plain_values(rank, world_size):
    """A checkpoint of the unconverted model, loaded into a sharded one."""
    torch.manual_seed(5)
    plain = mlp()
    model = shard(built("tensorwise"), world_size)
    own = model.state_dict()
    state = {
        name: dist.tensor.distribute_tensor(value, own[name].device_mesh, own[name].placements)
        for name, value in plain.state_dict().items()
    }
    model.load_state_dict(state)
    loss_of(model, torch.ones(4, 24))
    model.reshard()
    starts = [layer.weight.to_local().get_high_precision_init_val() for layer in model]
    return starts, [layer.weight_scale_e4m3.item() for layer in model]


@pytest.mark.parametrize("world_size", [2, 3])
def test_loaded_high_precision_values_get_their_own_scale_and_become_the_start(run_ranks, world_size):
    torch.manual_seed(5)
    plain = mlp()
    results = run_ranks(world_size, load_plain_values)
    for index, layer in enumerate(plain):
        assert torch.equal(torch.cat([starts[index] for starts, _ in results]), layer.weight)
        scale = torch.tensor(448.0) / layer.weight.abs().max()
        assert {scales[index] for _, scales in results} == {scale.item()}


def refused(rank, world_size):
    messages = []
    model = shard(built("tensorwise"), world_size, reshard_after_forward=2)
    try:
        loss_of(model, torch.ones(4, 24))
    except Fp8Error as error:
        messages.append(str(error))
    model = shard(mlp(), world_size)
    try:
        fti.convert_linear(model)
    except Fp8Error as error:
        messages.append(str(error))
    try:
        model = shard(built("tensorwise"), world_size)
        fti.PrimaryFloat8Linear.forward(model[0], torch.ones(4, 24))
    except Fp8Error as error:
        messages.append(str(error))
    return messages


def test_what_cannot_work_is_refused_on_all_ranks(run_ranks):
    for messages in run_ranks(4, refused):
        assert "shard over a two-dimensional mesh (HSDP)" in messages[0]
        assert "Convert the model first, then apply fully_shard" in messages[1]
        assert "call the model through the module that fully_shard was applied to" in messages[2]


def exported(rank, world_size):
    model = shard(built("tensorwise"), world_size)
    optimizer = optimizer_for(model)
    return fti.export_fp32_state_dict(model, optimizer, full_tensors=True)


def test_export_gathers_the_masters(run_ranks):
    torch.manual_seed(0)
    plain = mlp().state_dict()
    for state in run_ranks(3, exported):
        assert state.keys() == plain.keys()
        assert all(torch.equal(state[name], plain[name]) for name in plain)
