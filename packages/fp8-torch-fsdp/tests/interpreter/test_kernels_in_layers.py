"""A training step with the Triton kernels gives the bits of one without, and launches the kernels it should."""

import pytest
import torch
from torch import nn

import fp8_torch_fsdp as f8
from fp8_common.torch import _triton

# Kernels of one forward and backward of a layer without FSDP, and of the update before the forward: input, weight,
# gradient. The backward takes the weight's codes of the forward. The gradient of a weight contracts columns, which the
# references cast on CPU for block-wise scaling.
BOTH_WAYS = ("cast_transpose", "cast", "cast_transpose")
LAUNCHES = {
    "tensorwise": (["amax", "cast_transpose", "amax", "cast", "amax", "cast_transpose"], {}),
    "tensorwise_delayed": (
        ["delayed_update", *(name for cast in BOTH_WAYS for name in (cast, "delayed_current"))],
        {"delayed": f8.DelayedScalingConfig(initial="one")},
    ),
    "rowwise": (["amax_both", "scales", "cast_both", "rowwise", "amax_both", "scales", "cast_both"], {}),
    "rowwise_with_gw_hp": (["rowwise"] * 3, {}),
    "blockwise": (["block_1x128", "block_128x128", "block_1x128"], {}),
}


def step(recipe, changes):
    torch.manual_seed(0)
    config = f8.Float8LinearConfig.from_recipe_name(recipe, **changes)
    layer = f8.convert_to_float8_training(nn.Linear(256, 128), config=config)
    x = torch.randn(128, 256, requires_grad=True)
    layer(x).square().sum().backward()
    return x.grad, layer.weight.grad, layer.bias.grad


@pytest.mark.parametrize("recipe", LAUNCHES)
def test_kernels_give_the_bits_of_the_references(recipe, monkeypatch):
    kernels, changes = LAUNCHES[recipe]
    launched, run = [], _triton.run
    monkeypatch.setattr(
        _triton, "run", lambda plan, *x, **tensors: (launched.append(plan.name), run(plan, *x, **tensors))
    )
    monkeypatch.setenv("FP8_COMMON_BACKEND", "triton")
    got = step(recipe, changes)
    assert launched == kernels
    monkeypatch.setenv("FP8_COMMON_BACKEND", "reference")
    for g, w in zip(got, step(recipe, changes), strict=True):
        assert torch.equal(g, w)
    assert launched == kernels


class Experts(nn.Module):
    """Stacked weights of three experts."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.Parameter(torch.randn(3, 48, 64) / 8)


GROUPS = ["group_amax", "group_cast"]
EXPERTS = {
    "tensorwise": [*GROUPS, "rowwise", *GROUPS],
    "rowwise": ["rowwise", "rowwise", *GROUPS, *GROUPS, "rowwise"],
}


def experts_step(recipe):
    config = f8.Float8LinearConfig.from_recipe_name(recipe, all_gather=True)
    layout = f8.ExpertLayout(forward=lambda e, x, offsets: e.grouped_product("up", x, offsets), weights=("up",))
    experts = f8.convert_to_float8_training(Experts(), config=config, experts={Experts: layout})
    x = torch.randn(40, 64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    y = experts(x, torch.tensor([17, 17, 38], dtype=torch.int32))
    y.square().sum().backward()
    return y.detach(), x.grad, experts.up.grad


@pytest.mark.parametrize("recipe", EXPERTS)
def test_kernels_of_experts_give_the_bits_of_the_references(recipe, monkeypatch):
    launched, run = [], _triton.run
    monkeypatch.setattr(
        _triton, "run", lambda plan, *x, **tensors: (launched.append(plan.name), run(plan, *x, **tensors))
    )
    monkeypatch.setenv("FP8_COMMON_BACKEND", "triton")
    got = experts_step(recipe)
    of_groups = [name for name in launched if name in (*GROUPS, "rowwise")]
    assert of_groups == EXPERTS[recipe]
    monkeypatch.setenv("FP8_COMMON_BACKEND", "reference")
    for g, w in zip(got, experts_step(recipe), strict=True):
        assert torch.equal(g, w)
