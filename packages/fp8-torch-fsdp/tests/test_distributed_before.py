"""Models that were distributed before they were converted, or by a framework's own code: the same numbers."""

import functools

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import fp8_torch_fsdp as f8
from fp8_common import Fp8Error

RECIPES = ("tensorwise", "tensorwise_delayed", "rowwise", "rowwise_with_gw_hp", "blockwise")


class Block(nn.Module):
    def __init__(self, bias):
        super().__init__()
        self.up, self.down = nn.Linear(24, 40, bias=bias), nn.Linear(40, 24, bias=bias)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(x)))


def blocks(bias):
    torch.manual_seed(0)
    return nn.Sequential(Block(bias), Block(bias))


def wrapped_forward(layer, inside, outside):
    """Put a function around the forward of a layer, as Transformers and torchtitan do."""
    forward = layer.forward

    def placed(x):
        return outside(forward(inside(x)))

    layer.forward = placed


def distribute(block, mesh, way):
    if way == "torch":
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
        return
    for layer, cut, bias_cut in ((block.up, Shard(0), Shard(0)), (block.down, Shard(1), Replicate())):
        layer.weight = nn.Parameter(distribute_tensor(layer.weight, mesh, [cut]))
        if layer.bias is not None:
            layer.bias = nn.Parameter(distribute_tensor(layer.bias, mesh, [bias_cut]))
    wrapped_forward(
        block.up, lambda x: DTensor.from_local(x, mesh, [Replicate()], run_check=False), lambda y: y.to_local()
    )
    wrapped_forward(
        block.down,
        lambda x: DTensor.from_local(x, mesh, [Shard(x.ndim - 1)], run_check=False),
        lambda y: y.redistribute(placements=[Replicate()]).to_local(),
    )


def trained(model, steps=3):
    """Return losses, the whole weights and the casts of some steps; every rank has the same batch."""
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    x = torch.randn(2, 8, 24, generator=torch.Generator().manual_seed(3))
    for _ in range(steps):
        loss = (model(x) - x.flip(-1)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    full = [p.full_tensor() if isinstance(p, DTensor) else p for p in model.state_dict().values()]
    return losses, [p.detach() for p in full]


def both_ways(rank, world_size, recipe, way, bias):
    mesh = init_device_mesh("cpu", (world_size,))
    first, later = f8.convert_to_float8_training(blocks(bias), recipe=recipe), blocks(bias)
    for block in first:
        plan = {"up": f8.Float8ColwiseParallel(), "down": f8.Float8RowwiseParallel()}
        parallelize_module(block, mesh, plan)
    for block in later:
        distribute(block, mesh, way)
    before = [(name, p.placements) for name, p in later.named_parameters()]
    f8.convert_to_float8_training(later, recipe=recipe)
    assert [(name, p.placements) for name, p in later.named_parameters()] == before
    local = later[0].up.weight._local_tensor
    assert isinstance(local, f8.ShardedFloat8Weight)
    report = f8.float8_report(later)
    assert report.converted > 0.9
    assert report.gathered > 0.9
    (losses, weights), (wanted, expected) = trained(later), trained(first)
    assert losses == wanted
    return [torch.equal(one, other) for one, other in zip(weights, expected, strict=True)]


@pytest.mark.distributed
@pytest.mark.parametrize("way", ["torch", "forward"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_conversion_after_the_distribution_gives_the_numbers_of_before(run_ranks, recipe, way):
    for rank in run_ranks(2, both_ways, recipe, way, recipe in ("tensorwise", "rowwise")):
        assert all(rank)


def one_amax(rank, world_size):
    mesh = init_device_mesh("cpu", (world_size,))
    model = blocks(False)[0]
    with torch.no_grad():
        model.up.weight[0, 0] = 8.0  # in the part of the first rank
    distribute(model, mesh, "torch")
    f8.convert_to_float8_training(model, recipe="tensorwise_delayed")
    model(torch.ones(2, 24)).sum().backward()
    f8.synchronize_scales(model)
    return float(model.up.fp8_weight.history[0])


@pytest.mark.distributed
def test_an_amax_of_one_part_is_known_to_all(run_ranks):
    assert run_ranks(2, one_amax) == [8.0, 8.0]


def with_fsdp(rank, world_size, recipe):
    """Two ways to begin, then FSDP2 over the other dimension of the mesh."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "parts"))
    first, later = f8.convert_to_float8_training(blocks(False), recipe=recipe), blocks(False)
    for block in first:
        plan = {"up": f8.Float8ColwiseParallel(), "down": f8.Float8RowwiseParallel()}
        parallelize_module(block, mesh["parts"], plan)
    for block in later:
        distribute(block, mesh["parts"], "forward")
    f8.convert_to_float8_training(later, recipe=recipe)
    for model in (first, later):
        for block in model:
            fully_shard(block, mesh=mesh["data"])
        fully_shard(model, mesh=mesh["data"])
    (losses, weights), (wanted, expected) = trained(later), trained(first)
    assert losses == wanted
    wires = {w.wire for w in f8.float8_report(later).weights}
    return [torch.equal(one, other) for one, other in zip(weights, expected, strict=True)], wires


@pytest.mark.distributed
@pytest.mark.parametrize("recipe", ["tensorwise", "tensorwise_delayed", "rowwise"])
def test_fsdp_shards_converted_parts_further(run_ranks, recipe):
    for same, wires in run_ranks(4, with_fsdp, recipe):
        assert all(same)
        assert wires == {"float8_e4m3fn"}


def refusals(rank, world_size):
    mesh, told = init_device_mesh("cpu", (world_size, 1), mesh_dim_names=("a", "b")), []
    twice = blocks(False)[0]
    twice.up.weight = nn.Parameter(distribute_tensor(twice.up.weight, mesh, [Shard(0), Shard(1)]))
    sharded = fully_shard(blocks(False), mesh=mesh["a"])
    for model in (twice, sharded):
        try:
            f8.convert_to_float8_training(model)
        except Fp8Error as error:
            told.append(str(error))
    return told


@pytest.mark.distributed
def test_what_cannot_be_converted_is_refused_on_all_ranks(run_ranks):
    for twice, sharded in run_ranks(2, refusals):
        assert "cannot compute in FP8. Cut it along its rows or its columns" in twice
        assert "must run before fully_shard" in sharded


def replicated(rank, world_size):
    mesh = init_device_mesh("cpu", (world_size,))
    model, twin = blocks(True), f8.convert_to_float8_training(blocks(True))
    distribute_module(model, mesh)
    f8.convert_to_float8_training(model)
    x = torch.randn(4, 24, generator=torch.Generator().manual_seed(1))
    placed = distribute_tensor(x, mesh, [Shard(0)])
    found = model(placed).full_tensor()
    found.square().sum().backward()
    twin(x).square().sum().backward()
    same = [
        torch.equal(p.grad.full_tensor(), q.grad) for p, q in zip(model.parameters(), twin.parameters(), strict=True)
    ]
    return torch.equal(found, twin(x)), same


@pytest.mark.distributed
def test_weights_that_all_ranks_hold_compute_as_on_one(run_ranks):
    for same, gradients in run_ranks(2, replicated):
        assert same
        assert all(gradients)


def closure(layer):
    forward = layer.forward
    layer.forward = lambda x: forward(x) + 1


def as_accelerate_does_it(layer):
    layer._old_forward = layer.forward
    layer.forward = functools.partial(lambda module, x: module._old_forward(x) + 1, layer)


@pytest.mark.parametrize("wrap", [closure, as_accelerate_does_it])
def test_a_forward_around_a_layer_is_one_around_the_fp8_layer(wrap):
    torch.manual_seed(0)
    plain = nn.Linear(32, 48)
    x = torch.randn(4, 32)
    expected = f8.convert_to_float8_training(nn.Sequential(nn.Linear(32, 48)))
    expected[0].load_state_dict(plain.state_dict())
    wanted, exact = expected(x) + 1, plain(x) + 1
    model = nn.Sequential(plain)
    wrap(plain)
    f8.convert_to_float8_training(model)
    assert torch.equal(model(x), wanted)
    assert not torch.equal(model(x), exact)
    assert model[0] is plain, "it is the same object"
    assert torch.equal(f8.unconvert(model)(x), exact)


def test_a_forward_that_does_not_call_the_layer_leaves_it_wide():
    layer = nn.Linear(32, 48)
    layer.forward = lambda x: nn.functional.linear(x, layer.weight) * 2
    model = f8.convert_to_float8_training(nn.Sequential(layer, nn.Linear(48, 32)))
    assert type(model[0]) is nn.Linear
    assert isinstance(model[1], f8.Float8Linear)
