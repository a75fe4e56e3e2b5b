"""Values that are put into an FP8 weight are the values that it computes with, however they get there."""

import copy
import ctypes

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.nn.utils.prune import l1_unstructured, remove

import fp8_torch_fsdp as f8
from fp8_common import Fp8Error

X = torch.randn(4, 16, generator=torch.Generator().manual_seed(3))


def layers():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 16, bias=False), nn.Linear(16, 8))


def set_data(model):
    for parameter in model.parameters():
        parameter.data = parameter.data * 3


def set_transposed(model):
    model[0].weight.data = (torch.arange(256.0).view(16, 16) / 256).t()


def from_vector(model):
    vector_to_parameters(parameters_to_vector(model.parameters()).detach() * 2, model.parameters())


def prune(model):
    l1_unstructured(model[0], "weight", amount=0.5)
    model(X)
    remove(model[0], "weight")


def restore(model):
    """What sharpness-aware minimisation does."""
    kept = [parameter.data.clone() for parameter in model.parameters()]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    model(X)
    for parameter, old in zip(model.parameters(), kept, strict=True):
        parameter.data = old


@pytest.mark.parametrize("recipe", ["tensorwise", "tensorwise_delayed", "rowwise"])
@pytest.mark.parametrize("change", [set_data, set_transposed, from_vector, prune, restore])
def test_data_that_is_set_is_computed_with(change, recipe):
    low = f8.convert_to_float8_training(layers(), recipe=recipe)
    low(X)
    wanted = layers()
    change(low)
    change(wanted)
    twin = f8.convert_to_float8_training(copy.deepcopy(wanted), recipe=recipe)
    assert torch.equal(low(X), twin(X))
    own, plain = low.state_dict(), wanted.state_dict()
    assert all(torch.equal(own[name], plain[name]) for name in plain)


@pytest.mark.parametrize("value", [torch.zeros(8, 16), torch.zeros(16, 16, dtype=torch.int32)])
def test_data_of_another_form_is_refused(value):
    low = f8.convert_to_float8_training(layers())
    with pytest.raises(Fp8Error, match="can be set to a plain tensor like it"):
        low[0].weight.data = value


@pytest.mark.parametrize("recipe", ["tensorwise", "tensorwise_delayed", "rowwise"])
def test_data_of_another_dtype_makes_a_weight_of_that_dtype(recipe):
    """Accelerate makes float32 parameters of bfloat16 ones so, before it shards them."""
    low = f8.convert_to_float8_training(layers().bfloat16(), recipe=recipe)
    optimizer = torch.optim.AdamW(low.parameters())
    for parameter in low.parameters():
        parameter.data = parameter.data.to(torch.float32)
    twin = f8.convert_to_float8_training(layers().bfloat16().float(), recipe=recipe)
    for net in (low, twin):
        net(X).sum().backward()
    assert {p.dtype for p in low.parameters()} == {torch.float32}
    assert [id(p) for p in optimizer.param_groups[0]["params"]] == [id(p) for p in low.parameters()]
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(low.parameters(), twin.parameters(), strict=True))
    optimizer.step()
    torch.optim.AdamW(twin.parameters()).step()
    assert torch.equal(low(X), twin(X))
    assert all(torch.equal(p, q) for p, q in zip(low.state_dict().values(), twin.state_dict().values(), strict=True))


def test_a_write_by_address_is_computed_with():
    low = f8.convert_to_float8_training(layers()[:1], recipe="tensorwise_delayed")
    optimizer = torch.optim.SGD(low.parameters(), lr=0.0)
    for _ in range(2):
        low(X).sum().backward()
        optimizer.step()
    weight = low[0].weight
    values = (ctypes.c_float * weight.numel()).from_address(weight.data_ptr())
    values[:] = [100 * value for value in values]
    assert error_of(low) < 0.1, "the delayed scale is that of the weight as it is"


@torch.no_grad()
def error_of(low, factor=100):
    """Return the relative error of a first layer whose weight was multiplied."""
    wanted = layers()[:1]
    wanted[0].weight.mul_(factor)
    return float((low(X) - wanted(X)).norm() / wanted(X).norm())


def shard(model, world_size):
    mesh = init_device_mesh("cpu", (world_size,))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def set_sharded(rank, world_size):
    """torch sets the data of a DTensor without touching its local tensor, in FP8 and in high precision."""
    results = []
    for model in (layers(), f8.convert_to_float8_training(layers())):
        parameter = shard(model, world_size)[0].weight
        before = parameter.to_local().detach().clone()
        parameter.data = DTensor.from_local(torch.ones_like(before), parameter.device_mesh, parameter.placements)
        results.append(torch.equal(parameter.to_local(), before))
    return results


@pytest.mark.distributed
def test_data_of_sharded_weights_is_set_as_torch_sets_it(run_ranks):
    """If this fails because the first is False, torch sets it now, and FP8 weights have to follow."""
    assert run_ranks(2, set_sharded) == [[True, True]] * 2


def broadcast(local):
    dist.broadcast(local, 0)


def all_reduce(local):
    dist.all_reduce(local.data)


def gather(local):
    dist.all_gather_into_tensor(local.view(-1), torch.full((local.numel() // 2,), float(1 + dist.get_rank())))


def from_another(local):
    if dist.get_rank():
        dist.send(local, 0)
    else:
        dist.recv(local, 1)


COLLECTIVES = {"broadcast": broadcast, "all_reduce": all_reduce, "all_gather": gather, "recv": from_another}


def write_with_collective(rank, world_size, name):
    x = X
    plain, low = shard(layers(), world_size), shard(f8.convert_to_float8_training(layers()), world_size)
    before = low(x)
    low.reshard()
    for model in (plain, low):
        with torch.no_grad():
            COLLECTIVES[name](model[0].weight.to_local())
    twin = layers()
    twin.load_state_dict({key: value.full_tensor() for key, value in plain.state_dict().items()})
    expected = f8.convert_to_float8_training(twin)(x)
    after = low(x)
    return not torch.equal(before, after) and torch.equal(after, expected)


@pytest.mark.distributed
@pytest.mark.filterwarnings("ignore:.*all_gather_into_tensor.*:FutureWarning")
@pytest.mark.parametrize("name", COLLECTIVES)
def test_collectives_write_to_weights(run_ranks, name):
    # of "recv" too, where only one of two ranks receives
    assert run_ranks(2, write_with_collective, name) == [True, True]


def broadcast_whole(rank, world_size):
    model = f8.convert_to_float8_training(layers()[:1], recipe="tensorwise_delayed")
    with torch.no_grad():
        model(X)
        if rank:  # no operator of torch sees it on rank 0
            model[0].weight.mul_(50)
    model(X).sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.0).step()
    dist.broadcast(model[0].weight.data, 1)
    return error_of(model, 50)


@pytest.mark.distributed
def test_a_broadcast_of_a_whole_weight_is_a_write(run_ranks):
    assert max(run_ranks(2, broadcast_whole)) < 0.1


def read_gathered(rank, world_size, recipe):
    model = f8.convert_to_float8_training(layers(), recipe=recipe)
    with torch.no_grad():
        model[0].weight.mul_(torch.logspace(-2, 2, 16)[:, None])
    shard(model, world_size)(X)
    model[0].unshard()
    weight = model[0].weight
    whole = weight.dequantize()
    reads = [
        lambda w: w.view(-1).norm(),
        lambda w: w.reshape(4, 64).sum(1),
        lambda w: w.flatten()[-5:],
        lambda w: w.unflatten(0, (4, 4)).sum(),
        lambda w: w.T.as_strided((4, 4), (16, 1), 17),
        lambda w: w.detach().norm(),
        lambda w: torch.zeros(16, 16).add_(w),
        lambda w: torch.tensor(w.tolist()),
        lambda w: torch.from_numpy(w.detach().numpy()),
    ]
    with pytest.raises(RuntimeError, match="would write to a gathered FP8 weight"):
        dist.all_reduce(weight)
    return [index for index, read in enumerate(reads) if not torch.equal(read(weight), read(whole))]


@pytest.mark.distributed
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "blockwise"])
def test_a_gathered_weight_reads_the_same_through_every_view(run_ranks, recipe):
    assert run_ranks(2, read_gathered, recipe) == [[], []]
