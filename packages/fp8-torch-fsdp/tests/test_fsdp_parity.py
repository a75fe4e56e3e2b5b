"""FP8 on the wire changes no number: bit for bit the run whose weights are gathered in high precision."""

import dataclasses
import itertools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import fp8_torch_fsdp as f8
from fp8_common import POWER_OF_2

pytestmark = pytest.mark.distributed

# rows of the linear layers: uneven over 2 and 3 ranks, 2 rows over 3 ranks leave one rank empty
TRAINED_RECIPES = ("tensorwise", "tensorwise_delayed", "rowwise", "rowwise_with_gw_hp", "blockwise")
WIDTHS = {
    "even": (24, 48, 24, 12),
    "uneven": (24, 40, 7, 24),
    "empty_rank": (24, 2, 40, 2),
    "blocks": (24, 200, 150, 24),
}


class Block(nn.Module):
    def __init__(self, inputs: int, outputs: int):
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)
        self.norm = nn.LayerNorm(outputs)

    def forward(self, x):
        return self.norm(nn.functional.gelu(self.linear(x)))


STATIC = f8.Float8LinearConfig(
    recipe=f8.Recipe(
        name="static",
        input=f8.CastConfig(scaling="static", static_scale=64.0),
        weight=f8.CastConfig(scaling="static", static_scale=256.0),
        grad_output=f8.CastConfig(format="e5m2", scaling="static", static_scale=2.0**12),
    )
)
FNUZ = f8.Float8LinearConfig(
    recipe=f8.Recipe(
        name="fnuz",
        input=f8.CastConfig(format="e4m3fnuz"),
        weight=f8.CastConfig(format="e4m3fnuz", policy=POWER_OF_2),
        grad_output=f8.CastConfig(format="e5m2fnuz"),
    )
)
RECIPES = {
    **{name: f8.Float8LinearConfig.from_recipe_name(name) for name in TRAINED_RECIPES},
    "delayed_from_one": f8.Float8LinearConfig.from_recipe_name(
        "tensorwise_delayed",
        delayed=f8.DelayedScalingConfig(history_len=3, scale_fn="most_recent", margin=1, initial="one"),
    ),
    "static": STATIC,
    "fnuz_power_of_2": FNUZ,
}
# MAX all-reduces of a step: one before the forward, none where scales are constants
REDUCTIONS = {"static": 0}


def build(widths, dtype, all_gather: bool, recipe: str = "tensorwise") -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(a, b) for a, b in itertools.pairwise(widths))).to(dtype)
    config = dataclasses.replace(RECIPES[recipe], all_gather=all_gather)
    return f8.convert_to_float8_training(model, config=config)


def shard(model: nn.Sequential, world_size: int, **options) -> nn.Module:
    mesh = init_device_mesh("cpu", (world_size,))
    for block in list(model)[:-1]:
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh)


def train(model: nn.Module, rank: int, dtype: torch.dtype, steps: int = 10) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(rank)
    losses = []
    for _ in range(steps):
        x = torch.randn(16, 24, generator=generator).to(dtype)
        loss = (model(x).float() - 1).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def whole_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """All weights, and all delayed scales and histories."""
    f8.synchronize_scales(model)
    return {
        name: value.full_tensor() if hasattr(value, "full_tensor") else value
        for name, value in model.state_dict().items()
    }


def compare_gathers(rank, world_size, widths, dtype, recipe, options):
    low = shard(build(widths, dtype, all_gather=True, recipe=recipe), world_size, **options)
    high = shard(build(widths, dtype, all_gather=False, recipe=recipe), world_size, **options)
    losses = train(low, rank, dtype), train(high, rank, dtype)
    counts = f8.float8_report(low).casts, f8.float8_report(low).reductions
    weights = whole_weights(low), whole_weights(high)
    different = [name for name in weights[0] if not torch.equal(weights[0][name], weights[1][name])]
    return losses, different, *counts


# in this order, so that by default recipes whose scales the ranks agree on run on several
@pytest.mark.matrix(
    "each",
    world_size=[2, 3, 4, 1],
    widths=list(WIDTHS),
    recipe=list(RECIPES),
    dtype=[torch.float32, torch.bfloat16],
    reshard=[True, False],
)
def test_ten_adamw_steps_equal_a_high_precision_gather(run_ranks, world_size, widths, recipe, dtype, reshard):
    options = {"reshard_after_forward": reshard}
    results = run_ranks(world_size, compare_gathers, WIDTHS[widths], dtype, recipe, options)
    for (low, high), different, casts, reductions in results:
        assert low == high
        assert not different
        assert low[-1] < low[0]
        assert casts == 3 * 10, "one cast per weight and forward, which serves the backward"
        per_step = REDUCTIONS.get(recipe, 1) if world_size > 1 else 0
        assert reductions == 10 * per_step, "one MAX all-reduce per forward, none for constants"


def replicated_twin(rank, world_size, widths, recipe):
    """Every rank holds the whole model and averages its gradients."""
    sharded = shard(build(widths, torch.float32, all_gather=True, recipe=recipe), world_size)
    twin = build(widths, torch.float32, all_gather=False, recipe=recipe)
    optimizer = torch.optim.AdamW(twin.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(rank)
    losses = []
    for _ in range(10):
        loss = (twin(torch.randn(16, 24, generator=generator)) - 1).square().mean()
        loss.backward()
        for parameter in twin.parameters():
            dist.all_reduce(parameter.grad, op=dist.ReduceOp.SUM)
            parameter.grad.div_(world_size)
        optimizer.step()
        optimizer.zero_grad()
        f8.synchronize_scales(twin, group=dist.group.WORLD)
        losses.append(loss.item())
    same_losses = train(sharded, rank, torch.float32) == losses
    weights = whole_weights(sharded)
    return same_losses, [n for n, p in twin.named_parameters() if not torch.equal(weights[n], p)]


@pytest.mark.matrix("each", world_size=[2, 1], recipe=list(RECIPES))
def test_equals_a_replicated_model(run_ranks, world_size, recipe):
    for same_losses, different in run_ranks(world_size, replicated_twin, WIDTHS["uneven"], recipe):
        assert same_losses
        assert not different
