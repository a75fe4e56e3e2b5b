"""Tensor parallelism: one scale over both meshes, FP8 on every gather, and the same numbers with and without FSDP2."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import fp8_torch_fsdp as f8
from fp8_common import Fp8Error
from fp8_common.torch import dequantize_mx, quantize_mx
from tests.helpers.collectives import CollectiveCounter
from tests.helpers.whole_states import unlike, whole

pytestmark = pytest.mark.distributed

DIM, HIDDEN, BATCH, SEQUENCE = 24, 40, 2, 8
RECIPES = ("tensorwise", "tensorwise_delayed", "rowwise", "rowwise_with_gw_hp", "blockwise")


class Attention(nn.Module):
    """Two layers that share one input, like the projections of an attention."""

    def __init__(self):
        super().__init__()
        self.q, self.v = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM, bias=False)
        self.out = nn.Linear(DIM, DIM, bias=False)

    def forward(self, x):
        return self.out(torch.sigmoid(self.q(x)) * self.v(x))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.attention = Attention()
        self.up, self.down = nn.Linear(DIM, HIDDEN), nn.Linear(HIDDEN, DIM)

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


def sequence_plan():
    """Activations between the layers are cut along the sequence."""
    return {
        "norm1": SequenceParallel(use_local_output=True),
        "norm2": SequenceParallel(use_local_output=True),
        "attention": f8.PrepareFloat8ModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
        "attention.q": f8.Float8ColwiseParallel(),
        "attention.v": f8.Float8ColwiseParallel(),
        "attention.out": f8.Float8RowwiseParallel(output_layouts=Shard(1)),
        "up": f8.Float8ColwiseParallel(input_layouts=Shard(1)),
        "down": f8.Float8RowwiseParallel(output_layouts=Shard(1)),
    }


def whole_plan():
    """Activations between the layers are whole on every rank."""
    return {
        "attention.q": f8.Float8ColwiseParallel(),
        "attention.v": f8.Float8ColwiseParallel(),
        "attention.out": f8.Float8RowwiseParallel(),
        "up": f8.Float8ColwiseParallel(),
        "down": f8.Float8RowwiseParallel(),
    }


PLANS = {"sequence": sequence_plan, "whole": whole_plan}


def blocks(recipe, all_gather=True, layers=1):
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(layers)))
    config = f8.Float8LinearConfig.from_recipe_name(recipe, all_gather=all_gather)
    return f8.convert_to_float8_training(model, config=config)


def parallel(model, mesh, plan, fsdp=True, **options):
    for block in model:
        parallelize_module(block, mesh["tp"], PLANS[plan]())
        if fsdp:
            fully_shard(block, mesh=mesh["dp"], **options)
    return fully_shard(model, mesh=mesh["dp"], **options) if fsdp else model


def mesh_of(dp, tp):
    return init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp", "tp"))


def batch(step, dp_rank, mesh, plan):
    generator = torch.Generator().manual_seed(100 * step + dp_rank)
    x = torch.randn(BATCH, SEQUENCE, DIM, generator=generator)
    return x.chunk(mesh["tp"].size(), 1)[mesh["tp"].get_local_rank()] if plan == "sequence" else x


def train(model, mesh, plan, steps=3, after_step=None):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(steps):
        y = model(batch(0, mesh["dp"].get_local_rank(), mesh, plan))
        (loss := (y - 1).square().sum() / (BATCH * SEQUENCE * DIM)).backward()
        optimizer.step()
        optimizer.zero_grad()
        if after_step is not None:
            after_step(model)
        losses.append(loss.item())
    return losses


# ---------------------------------------------------------------- what the gather changes: nothing


def compare_gathers(rank, world_size, dp, recipe, plan, options):
    mesh = mesh_of(dp, world_size // dp)
    low, high = (parallel(blocks(recipe, gather), mesh, plan, **options) for gather in (True, False))
    losses = train(low, mesh, plan), train(high, mesh, plan)
    counts = f8.float8_report(low).casts, f8.float8_report(low).reductions
    return losses, unlike(whole(low), whole(high)), *counts


@pytest.mark.matrix(recipe=RECIPES, plan=list(PLANS), dp=[1, 2], reshard=[True, False])
def test_fp8_gather_equals_a_high_precision_gather(run_ranks, recipe, plan, dp, reshard):
    results = run_ranks(2 * dp, compare_gathers, dp, recipe, plan, {"reshard_after_forward": reshard})
    for (low, high), different, casts, reductions in results:
        assert low == high
        assert low[-1] < low[0]
        assert not different
        assert casts == 5 * 3, "one cast per weight and step"
        # scales of row-parallel weights are agreed on by row-wise recipes too; blocks belong to one rank's part
        # delayed scaling combines what it saw when a backward ends, too
        # scales of rows that tensor parallelism cuts whole concern the ranks of FSDP2 alone: a group of their own
        per_step = 2 if recipe.startswith("rowwise") and dp > 1 else 1
        assert reductions == (3 * per_step if recipe != "blockwise" or dp > 1 else 0)


def compare_with_tp_alone(rank, world_size, recipe, plan):
    """Every group of tensor-parallel ranks gets the same batch: FSDP2 then averages equal gradients."""
    mesh = mesh_of(2, world_size // 2)
    sharded = parallel(blocks(recipe), mesh, plan)
    alone = parallel(blocks(recipe), mesh, plan, fsdp=False)
    results = []
    for model in (sharded, alone):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        for step in range(3):
            y = model(batch(step, 0, mesh, plan))
            (loss := (y - 1).square().sum() / (BATCH * SEQUENCE * DIM)).backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        results.append((losses, whole(model)))
    (losses, weights), (losses_alone, weights_alone) = results
    return losses, losses_alone, unlike(weights, weights_alone)


@pytest.mark.matrix("each", recipe=RECIPES, plan=list(PLANS))
def test_equals_the_same_layout_without_fsdp(run_ranks, recipe, plan):
    for losses, alone, different in run_ranks(4, compare_with_tp_alone, recipe, plan):
        assert losses == alone
        assert not different


# ---------------------------------------------------------------- scales


def scales(rank, world_size, recipe, explicit):
    mesh = mesh_of(2, 2)
    model = parallel(blocks(recipe), mesh, "sequence")
    train(model, mesh, "sequence", after_step=f8.synchronize_scales if explicit else None)
    model(batch(9, 0, mesh, "sequence"))
    model.reshard()
    found = {}
    for name, parameter in model.named_parameters():
        local = parameter._local_tensor
        if isinstance(local, f8.ShardedFloat8Weight) and local.info.slot is not None:
            amax = parameter.full_tensor().abs().amax(-1 if recipe == "rowwise" else None)
            if recipe == "rowwise" and parameter.placements[-1].is_shard(0):
                # rows that tensor parallelism cuts have their scales on the ranks that hold them
                amax = amax.chunk(2)[mesh.get_local_rank(-1)]
            found[name] = (local.info.slot.scale.flatten().tolist(), amax.flatten().tolist())
    return found, f8.float8_report(model).reductions


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_scales_are_those_of_the_whole_weight_with_and_without_precompute(run_ranks, recipe):
    without, with_precompute = (run_ranks(4, scales, recipe, explicit) for explicit in (False, True))
    assert without[0][0], "some scales are agreed on"
    for (found, _), (again, reductions) in zip(without, with_precompute, strict=True):
        assert found == again
        groups = 2 if recipe == "rowwise" else 1
        assert reductions == groups * (4 + 3), "before each forward, and for each request"
    for scale, amax in (pair for found, _ in without for pair in found.values()):
        expected = 448 / torch.tensor(amax, dtype=torch.float64)
        if recipe == "rowwise":
            expected = torch.exp2(torch.log2(expected).floor())
        torch.testing.assert_close(torch.tensor(scale, dtype=torch.float64), expected, rtol=1e-6, atol=0)


# ---------------------------------------------------------------- what travels


def travelling(rank, world_size, recipe):
    mesh = mesh_of(1, world_size)
    model = parallel(blocks(recipe), mesh, "sequence")
    for _ in range(2):
        x = batch(0, 0, mesh, "sequence").requires_grad_()
        with CollectiveCounter() as forward:
            y = model(x)
        with CollectiveCounter() as backward:
            y.sum().backward()
    return forward.dtypes("all_gather"), backward.dtypes("all_gather")


@pytest.mark.parametrize("recipe", ["tensorwise", "tensorwise_delayed", "rowwise"])
def test_activations_and_gradients_travel_in_fp8(run_ranks, recipe):
    wire = torch.float32 if recipe == "rowwise" else torch.uint8
    for forward, backward in run_ranks(2, travelling, recipe):
        assert forward == [wire] * 2, "the attention's input once for both layers, and the input of the next"
        assert backward.count(wire) == 2, "the gradients of both row-parallel outputs"
        assert set(backward) == {wire}


# ---------------------------------------------------------------- against other layouts, and refusals


def gradients(model, x):
    y = model(x)
    y.sum().backward()
    grads = {
        name: p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad for name, p in model.named_parameters()
    }
    return {"output": y.detach(), **grads}


def against_one_process(rank, world_size, recipe, plan):
    """Return, for output and gradients, the relative errors of the parallel and of the single FP8 model."""
    mesh = mesh_of(1, world_size)
    torch.manual_seed(0)
    exact = gradients(nn.Sequential(Block()), batch(0, 0, mesh, "whole"))
    single = gradients(blocks(recipe), batch(0, 0, mesh, "whole"))
    parallel_one = gradients(parallel(blocks(recipe), mesh, plan, fsdp=False), batch(0, 0, mesh, plan))
    if plan == "sequence":
        exact["output"], single["output"] = (found["output"].chunk(world_size, 1)[rank] for found in (exact, single))
    return {
        name: [float((found[name] - exact[name]).norm() / exact[name].norm()) for found in (parallel_one, single)]
        for name in exact
    }


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_outputs_and_gradients_are_as_close_to_exact_as_those_of_one_process(run_ranks, recipe, plan):
    for errors in run_ranks(2, against_one_process, recipe, plan):
        assert max(single for _, single in errors.values()) < 0.2, "FP8's own noise, through three layers"
        assert {name: (p, single) for name, (p, single) in errors.items() if p > 1.5 * single + 0.01} == {}


def communicate_only(rank, world_size):
    mesh = mesh_of(2, 2)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(DIM, HIDDEN, bias=False), nn.Linear(HIDDEN, DIM, bias=False))
    rounded = [dequantize_mx(*quantize_mx(layer.weight.detach(), "e4m3"), "e4m3") for layer in model]
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    f8.compress_communication(model)
    x = torch.randn(4, DIM)
    return torch.allclose(model(x), x @ rounded[0].t() @ rounded[1].t(), rtol=1e-4, atol=1e-5)


def test_communication_only_works_with_torchs_own_styles(run_ranks):
    assert all(run_ranks(4, communicate_only))


def own_styles(rank, world_size, fsdp):
    model = f8.convert_to_float8_training(nn.Sequential(nn.Linear(16, 32, bias=False), nn.Linear(32, 16, bias=False)))
    mesh = mesh_of(2, 2)
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    if fsdp:
        fully_shard(model, mesh=mesh["dp"])
    try:
        model(torch.randn(4, 16))
    except Fp8Error as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("fsdp", [False, True])
def test_fp8_layers_with_torchs_own_styles_are_refused_on_all_ranks(run_ranks, fsdp):
    messages = run_ranks(4, own_styles, fsdp)
    assert len(set(messages)) == 1
    assert "Float8ColwiseParallel" in messages[0]


def refusals(rank, world_size):
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("tp",))
    mixed = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    mixed[0] = f8.convert_to_float8_training(mixed[0])
    mixed[1] = f8.convert_to_float8_training(mixed[1], recipe="rowwise")
    prepare = f8.PrepareFloat8ModuleInput(input_layouts=Shard(0), desired_input_layouts=Replicate())
    twice = parallelize_module(f8.convert_to_float8_training(nn.Linear(8, 8)), mesh, f8.Float8ColwiseParallel())
    cases = {
        "plain layer": lambda: parallelize_module(nn.Linear(8, 8), mesh, f8.Float8ColwiseParallel()),
        "nothing to follow": lambda: parallelize_module(nn.ReLU(), mesh, prepare),
        "layers differ": lambda: parallelize_module(mixed, mesh, prepare),
        "twice": lambda: parallelize_module(twice, mesh, f8.Float8RowwiseParallel()),
    }
    messages = {}
    for name, call in cases.items():
        try:
            call()
        except Fp8Error as error:
            messages[name] = str(error)
    return messages


def test_what_cannot_be_parallel_is_refused(run_ranks):
    for messages in run_ranks(2, refusals):
        assert "convert_to_float8_training first" in messages["plain layer"]
        assert "no Float8Linear" in messages["nothing to follow"]
        assert "cast theirs differently" in messages["layers differ"]
        assert "already distributed" in messages["twice"]


def one_style_for_many(rank, world_size):
    """One style object for several modules: each follows its own layer."""
    mesh = mesh_of(1, world_size)
    model = blocks("tensorwise_delayed", layers=2)
    style = f8.PrepareFloat8ModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
    for block in model:
        plan = {**sequence_plan(), "attention": style}
        parallelize_module(block, mesh["tp"], plan)
    model(batch(0, 0, mesh, "sequence")).sum().backward()
    return [int(block.attention.q.fp8_input.observed) for block in model]


def test_one_style_object_serves_many_modules(run_ranks):
    for keys in run_ranks(2, one_style_for_many):
        assert min(keys) >= 0, "each module observed its own input"
        assert len(set(keys)) == 2
