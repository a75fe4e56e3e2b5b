"""Stacked expert weights: the numbers of separate weights, bit for bit, on one rank and on several."""

import io

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import fp8_te_init as fti
from fp8_common import Fp8Error
from tests.helpers.collectives import CollectiveCounter

EXPERTS, OUT, IN = 5, 150, 130
RECIPES = ["tensorwise", "rowwise", "blockwise"]
DTYPES = [torch.float32, torch.bfloat16]


def values(dtype=torch.float32, seed=0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    # experts of different sizes, which one common scale would round otherwise
    sizes = torch.tensor([1.0, 0.01, 3.0, 0.3, 7.0]).view(-1, 1, 1)
    return (torch.randn(EXPERTS, OUT, IN, generator=generator) * sizes).to(dtype)


def stacked(recipe, dtype=torch.float32, seed=0, **options) -> fti.PrimaryFloat8Experts:
    return fti.PrimaryFloat8Experts(values(dtype, seed), recipe=recipe, **options)


def separate(recipe, dtype=torch.float32, seed=0) -> nn.ModuleList:
    layers = nn.ModuleList(nn.Linear(IN, OUT, bias=False, dtype=dtype) for _ in range(EXPERTS))
    with torch.no_grad():
        for layer, own in zip(layers, values(dtype, seed), strict=True):
            layer.weight.copy_(own)
    return fti.convert_linear(layers, recipe=recipe)


def inputs(dtype=torch.float32) -> torch.Tensor:
    return torch.randn(EXPERTS, 3, IN, generator=torch.Generator().manual_seed(9)).to(dtype)


def local(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def plain(weight: torch.Tensor) -> torch.Tensor:
    return weight.detach() + 0


def step(optimizer, gradients):
    for parameter, gradient in gradients:
        parameter.grad = gradient
    optimizer.step()
    optimizer.zero_grad()


def gradient() -> torch.Tensor:
    return torch.randn(EXPERTS, OUT, IN, generator=torch.Generator().manual_seed(3))


def after_training(recipe, dtype, steps=3):
    """Return codes and masters of separate weights after some steps."""
    layers = separate(recipe, dtype)
    optimizer = fti.MasterOptimizer(torch.optim.AdamW, layers.parameters(), lr=1e-2)
    fti.seed_masters(optimizer, layers)
    for _ in range(steps):
        step(optimizer, [(one.weight, own.to(dtype)) for one, own in zip(layers, gradient(), strict=True)])
    codes = torch.stack([one.weight.codes.view(torch.uint8) for one in layers])
    return codes, torch.stack(optimizer.masters()), torch.stack([plain(one.weight) for one in layers])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("recipe", RECIPES)
def test_start_steps_and_forward_are_those_of_separate_weights(recipe, dtype):
    experts = stacked(recipe, dtype)
    start = torch.stack([one.weight.codes.view(torch.uint8) for one in separate(recipe, dtype)])
    assert torch.equal(experts.weight.codes.view(torch.uint8), start)
    assert torch.equal(experts.weight.get_high_precision_init_val(), values(dtype))
    optimizer = fti.MasterOptimizer(torch.optim.AdamW, experts.parameters(), lr=1e-2)
    fti.seed_masters(optimizer, experts)
    assert torch.equal(optimizer.masters()[0], values(dtype).float())
    for _ in range(3):
        step(optimizer, [(experts.weight, gradient().to(dtype))])
    codes, masters, dequantized = after_training(recipe, dtype)
    assert torch.equal(experts.weight.codes.view(torch.uint8), codes)
    assert torch.equal(optimizer.masters()[0], masters)
    expected = torch.bmm(inputs(dtype), dequantized.transpose(1, 2))
    assert torch.equal(experts(inputs(dtype)), expected)
    looped = torch.stack([x @ experts.weight[e].T for e, x in enumerate(inputs(dtype))])
    torch.testing.assert_close(looped, expected)


@pytest.mark.parametrize("recipe", RECIPES)
def test_gradients_are_those_of_the_values(recipe):
    experts, x = stacked(recipe), inputs()
    dense = plain(experts.weight).requires_grad_()
    experts(x).square().sum().backward()
    torch.bmm(x, dense.transpose(1, 2)).square().sum().backward()
    assert torch.equal(experts.weight.grad, dense.grad)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("assign", [False, True])
def test_state_dicts_bring_the_bits_back(recipe, assign):
    saved, buffer = stacked(recipe), io.BytesIO()
    torch.save(saved.state_dict(), buffer)
    buffer.seek(0)
    other = stacked(recipe, seed=1)
    other.load_state_dict(torch.load(buffer, weights_only=True), assign=assign)
    assert torch.equal(other.weight.codes.view(torch.uint8), saved.weight.codes.view(torch.uint8))
    assert torch.equal(other.weight.scale, saved.weight.scale)
    other.load_state_dict({"weight": values(seed=2)})
    assert torch.equal(other.weight.codes.view(torch.uint8), stacked(recipe, seed=2).weight.codes.view(torch.uint8))


@pytest.mark.parametrize("preserve", ["cpu", "residual", "replay"])
def test_every_way_to_keep_values_is_exact_for_stacks(preserve):
    experts = stacked("tensorwise", torch.bfloat16, preserve=preserve)
    assert torch.equal(experts.weight.get_high_precision_init_val(), values(torch.bfloat16))
    experts.reset_parameters()
    drawn = experts.weight.get_high_precision_init_val()
    assert drawn.abs().max() <= IN**-0.5
    fti.philox_init_(experts.weight, fti.Normal(std=0.02), 1, "weight")
    optimizer = fti.MasterOptimizer(torch.optim.SGD, experts.parameters(), lr=0.1)
    assert torch.equal(optimizer.masters()[0], experts.weight.get_high_precision_init_val().float())


def test_moves_and_checkpoints_of_values():
    experts = stacked("tensorwise").to(torch.bfloat16)
    assert experts.weight.dtype == torch.bfloat16
    assert isinstance(experts.weight, fti.PrimaryFloat8Weight)
    optimizer = fti.MasterOptimizer(torch.optim.SGD, experts.parameters(), lr=0.1)
    fti.seed_masters(optimizer, experts, checkpoint={"weight": values(seed=4)})
    assert torch.equal(optimizer.masters()[0], values(seed=4))
    fti.seed_masters(optimizer, experts, checkpoint=stacked("tensorwise", seed=5).state_dict())
    assert torch.equal(optimizer.masters()[0], plain(stacked("tensorwise", seed=5).weight))
    report = fti.seed_masters(optimizer, experts, strict=False, source_order=["dither"])
    assert set(report.sources.values()) == {"dither"}


@pytest.mark.parametrize(
    ("weight", "options", "told"),
    [
        (torch.ones(4, 4), {}, "takes plain weights"),
        (torch.ones(2, 4, 4, dtype=torch.int32), {}, "takes plain weights"),
        (torch.ones(2, 4, 4), {"recipe": "tensorwise_delayed"}, "no delayed scaling"),
    ],
)
def test_what_cannot_be_a_stack_is_refused(weight, options, told):
    with pytest.raises(Fp8Error, match=told):
        fti.PrimaryFloat8Experts(weight, **options)


class Holder(nn.Module):
    def __init__(self, experts):
        super().__init__()
        self.experts = experts

    def forward(self, x):
        return self.experts(x)


def shard(experts, world_size):
    model = Holder(experts)
    mesh = init_device_mesh("cpu", (world_size,))
    fully_shard(model.experts, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def trained(rank, world_size, recipe, dtype, path):
    model = shard(stacked(recipe, dtype), world_size)
    optimizer = fti.MasterOptimizer(torch.optim.AdamW, model.parameters(), lr=1e-2)
    fti.seed_masters(optimizer, model)
    start = torch.equal(local(optimizer.masters()[0]), values(dtype).float())
    mine = model.experts.weight
    for _ in range(3):
        part = mine.to_local().state
        own = gradient()[part.first_row : part.first_row + part.rows].to(dtype)
        step(optimizer, [(mine, DTensor.from_local(own, mine.device_mesh, mine.placements, shape=mine.shape,
                                                   stride=gradient().stride()))])  # fmt: skip
    output = model(inputs(dtype))
    model.reshard()
    codes, masters, dequantized = after_training(recipe, dtype)
    expected = torch.bmm(inputs(dtype), dequantized.transpose(1, 2))
    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    same = [
        start,
        torch.equal(full["experts.weight"].view(torch.uint8), codes),
        torch.equal(local(optimizer.masters()[0]), masters),
        torch.equal(output, expected),
        optimizer.reductions == (3 if recipe != "none" else 0),
    ]
    state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.save(state, checkpoint_id=path)
    again = shard(stacked(recipe, dtype, seed=1), world_size)
    resumed = fti.MasterOptimizer(torch.optim.AdamW, again.parameters(), lr=1e-2)
    target = dict(zip(("model", "optimizer"), get_state_dict(again, resumed), strict=True))
    dcp.load(target, checkpoint_id=path)
    set_state_dict(again, resumed, model_state_dict=target["model"], optim_state_dict=target["optimizer"])
    same.append(torch.equal(local(resumed.masters()[0]), masters))
    same.append(torch.equal(again(inputs(dtype)), expected))
    third = shard(stacked(recipe, dtype, seed=2), world_size)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(third, full if rank == 0 else {}, options=options)
    return [*same, torch.equal(third(inputs(dtype)), expected)]


@pytest.mark.distributed
@pytest.mark.matrix("each", world_size=[2, 3], recipe=RECIPES, dtype=DTYPES)
def test_sharded_stacks_are_those_of_separate_weights(run_ranks, world_size, recipe, dtype, tmp_path):
    for same in run_ranks(world_size, trained, recipe, dtype, str(tmp_path / "checkpoint")):
        assert same == [True] * 8


def expert_parallel(rank, world_size, recipe):
    """EP 2 x FSDP 2: each pair of ranks has two experts of its own; return what equals separate weights, and bytes."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("expert", "part"))
    first = 2 * mesh["expert"].get_local_rank()
    own = slice(first, first + 2)
    model = Holder(fti.PrimaryFloat8Experts(values()[own], recipe=recipe))
    fully_shard(model.experts, mesh=mesh["part"])
    fully_shard(model, mesh=mesh["part"])
    optimizer = fti.MasterOptimizer(torch.optim.AdamW, model.parameters(), lr=1e-2)
    fti.seed_masters(optimizer, model)
    weight = model.experts.weight
    for _ in range(3):
        part = gradient()[own].chunk(2)[mesh["part"].get_local_rank()]
        step(optimizer, [(weight, DTensor.from_local(part, weight.device_mesh, weight.placements))])
    counter = CollectiveCounter()
    with counter:
        output = model(inputs()[own])
    model.reshard()
    codes, masters, dequantized = after_training(recipe, torch.float32)
    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    same = [
        torch.equal(full["experts.weight"].view(torch.uint8), codes[own]),
        torch.equal(local(optimizer.masters()[0]), masters[own]),
        torch.equal(output, torch.bmm(inputs()[own], dequantized[own].transpose(1, 2))),
    ]
    return same, counter.nbytes("all_gather") / (OUT * IN), optimizer.reductions


@pytest.mark.distributed
@pytest.mark.parametrize("recipe", RECIPES)
def test_expert_parallel_stacks_are_those_of_separate_weights(run_ranks, recipe):
    for same, gathered, reductions in run_ranks(4, expert_parallel, recipe):
        assert same == [True] * 3
        assert 1 <= gathered < 1.1, "one byte for each element of this rank's expert, and scales"
        assert reductions == 3
