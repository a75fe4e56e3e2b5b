"""A training step with the Triton kernels gives the bits of one without, and launches the kernels it should."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fp8_common.torch import _triton
from fp8_torch_fsdp import ExpertLayout, convert_to_float8_training, dispatch_tokens
from fsdp_models import Experts, converted, seeded, with_delayed
from fsdp_training import batch


def dense(recipe):
    options = {"delayed": with_delayed(initial="one")} if "delayed" in recipe else {}
    layer = converted(seeded(lambda: nn.Linear(256, 128)), recipe, **options)
    return layer, layer, (128, 256)


def experts(recipe):
    stack = converted(Experts(3, up=(48, 64)), recipe)
    return stack, lambda x: stack(x, torch.tensor([17, 17, 38], dtype=torch.int32)), (40, 64)


class Swiglu(Experts):
    def forward(self, x, offsets):
        return self.grouped_swiglu("gate_up", "down", x, offsets)


def gated(recipe):
    stack = Swiglu(3, dtype=torch.bfloat16, gate_up=(96, 64), down=(64, 48))
    layout = ExpertLayout(forward=Swiglu.forward, weights=stack.names)
    convert_to_float8_training(stack, recipe=recipe, experts={Swiglu: layout})
    return stack, lambda x: stack(x.bfloat16(), torch.tensor([17, 17, 38], dtype=torch.int32)), (40, 64)


def dispatched(recipe):
    stack = converted(Experts(3, up=(48, 64)), recipe)
    chosen = torch.tensor([0] * 17 + [2] * 23)[:, None]

    def call(x):
        tokens = dispatch_tokens(x, chosen, stack, dist.group.WORLD)
        return tokens.combine(stack(tokens.rows, tokens.offsets))[:, 0]

    return stack, call, (40, 64)


@pytest.fixture(autouse=True)
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


# Kernels of one forward and backward of a layer without FSDP, and of the update before the forward: input, weight,
# gradient. The backward takes the weight's codes of the forward. Of experts those of groups and rows are counted.
GROUPS = ("group_amax", "group_cast")
COUNTED = (*GROUPS, "rowwise", "rowwise_transposed", "group_columns", "dequantize")
CODES = ["rowwise", "rowwise_transposed", "rowwise", "dequantize", "group_columns", "dequantize", "group_columns"]
LAUNCHES = [
    (dense, "tensorwise", ["amax", "cast_transpose"] * 3),
    (dense, "tensorwise_delayed", ["delayed_update", *["cast_transpose"] * 3]),
    (dense, "rowwise", ["amax_both", "scales", "cast_both", "rowwise_transposed", "amax_both", "scales", "cast_both"]),
    (dense, "rowwise_with_gw_hp", ["rowwise", "rowwise_transposed", "rowwise"]),
    (dense, "blockwise", ["block_both"] * 3),
    (experts, "tensorwise", [*GROUPS, "rowwise", *GROUPS]),
    (experts, "rowwise", ["group_columns", "rowwise_transposed", "group_columns"]),
    (gated, "rowwise", ["group_columns", "rowwise_transposed", "rowwise_transposed", "group_columns"]),
    (dispatched, "rowwise", CODES),
]


@pytest.mark.parametrize(("make", "recipe", "kernels"), LAUNCHES)
def test_kernels_give_the_bits_of_the_references(make, recipe, kernels, monkeypatch):
    launched, run, results = [], _triton.run, []
    monkeypatch.setattr(
        _triton, "run", lambda plan, *x, **named: (launched.append(plan.name), run(plan, *x, **named))[1]
    )
    for backend in ("triton", "reference"):
        monkeypatch.setenv("FP8_COMMON_BACKEND", backend)
        module, call, shape = make(recipe)
        x = batch(1, 0, shape).requires_grad_()
        y = call(x)
        y.square().sum().backward()
        results.append([y.detach(), x.grad, *(parameter.grad for parameter in module.parameters())])
        assert [name for name in launched if make is dense or name in COUNTED] == kernels
    assert all(map(torch.equal, *results))
