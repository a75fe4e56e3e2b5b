"""No configuration at all makes FP8 on the wire change a number: random ones, whose seed is printed."""

import dataclasses
import functools
import itertools
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from torch import nn

import fp8_torch_fsdp as f8
from fp8_common import CANONICAL, POWER_OF_2
from tests.helpers.fsdp_models import shard
from tests.helpers.fsdp_rows import Row, both_gathers, compared
from tests.helpers.fsdp_training import adamw, batch

pytestmark = pytest.mark.distributed


@st.composite
def casts(draw: Any, formats: tuple[str, ...], granularities: tuple[str, ...]) -> f8.CastConfig:
    granularity = draw(st.sampled_from(granularities))
    scalings = ("dynamic", "static", "delayed") if granularity == "tensorwise" else ("dynamic",)
    scaling = draw(st.sampled_from(scalings))
    policy = draw(st.sampled_from((CANONICAL, POWER_OF_2)))
    if scaling == "delayed":
        algo = draw(st.sampled_from(("max", "most_recent")))
        policy = dataclasses.replace(policy, history=draw(st.integers(1, 4)), algo=algo)
    return f8.CastConfig(
        format=draw(st.sampled_from(formats)),
        scaling=scaling,
        granularity=granularity,
        policy=policy,
        static_scale=draw(st.sampled_from((0.5, 24.0, 256.0))) if scaling == "static" else None,
    )


@st.composite
def configs(draw: Any) -> f8.Float8LinearConfig:
    """Any configuration that has products: one family of granularities, E5M2 in one operand at most."""
    e4m3, e5m2 = draw(st.sampled_from((("e4m3", "e5m2"), ("e4m3fnuz", "e5m2fnuz"))))
    wide = draw(st.sampled_from(("grad_output", "input", "weight", None)))
    blockwise = draw(st.integers(0, 3)) == 0
    vectors, rows = ("tensorwise", "rowwise"), ("blockwise_1x128",)
    operands = {}
    for name in ("weight", "input", "grad_output"):
        of_blocks = ("blockwise_128x128",) if name == "weight" else rows
        operands[name] = draw(casts((e5m2 if wide == name else e4m3,), of_blocks if blockwise else vectors))
    if operands["weight"].granularity != "tensorwise" and operands["grad_output"].scaling == "delayed":
        operands["grad_output"] = f8.CastConfig(format=operands["grad_output"].format)
    if draw(st.integers(0, 3)) == 0:
        off = f8.CastConfig(scaling="disabled")
        operands.update(input_for_grad_weight=off, grad_output_for_grad_weight=off)
    return f8.Float8LinearConfig(
        recipe=f8.Recipe(name="drawn", **operands),
        pad_inner_dim=draw(st.booleans()),
    )


SIZES = st.one_of(st.integers(1, 9), st.integers(10, 48), st.sampled_from((127, 128, 129, 200, 257)))
RUNS = st.fixed_dictionaries(
    {
        "widths": st.lists(SIZES, min_size=2, max_size=4),
        "rows": st.integers(1, 8),
        "dtype": st.sampled_from((torch.float32, torch.bfloat16, torch.float16)),
        "bias": st.booleans(),
        "reshard": st.booleans(),
        "microbatches": st.integers(1, 3),
    }
)


def compare(rank: int, world_size: int, config: f8.Float8LinearConfig, run: dict[str, Any]) -> list[str]:
    """Return what differs between the FP8 gather and the high-precision gather."""

    def make() -> nn.Module:
        layers = [nn.Linear(a, b, bias=run["bias"]) for a, b in itertools.pairwise(run["widths"])]
        for layer in layers:  # rows of different sizes, or all row scales would be the same power of two
            layer.weight.data.mul_(torch.exp2(torch.randint(-2, 3, (layer.out_features, 1))))
        return nn.Sequential(*layers).to(run["dtype"])

    def inputs(rank: int, step: int) -> torch.Tensor:
        return batch(rank, step, (run["rows"], run["widths"][0])).to(run["dtype"])

    place = functools.partial(shard, reshard_after_forward=run["reshard"])
    models = both_gathers(make, place, pad_inner_dim=config.pad_inner_dim)
    row = Row(models, loop={"optimizer": adamw, "inputs": inputs, "microbatches": run["microbatches"]})
    return compared(rank, row, config.recipe).different


@pytest.mark.timeout(3600)
def test_random_configurations_equal_a_high_precision_gather(run_ranks, full):
    # a smaller failing configuration is not worth the minutes that processes take to find it
    @hypothesis.settings(
        max_examples=200 if full else 8,
        phases=[hypothesis.Phase.generate],
        derandomize=not full,
        deadline=None,
        database=None,
    )
    @hypothesis.given(world_size=st.integers(1, 3), config=configs(), run=RUNS)
    def check(world_size: int, config: f8.Float8LinearConfig, run: dict[str, Any]) -> None:
        for different in run_ranks(world_size, compare, config, run):
            assert not different

    check()
