"""`fp8_saved_input`: one byte per element is kept of inputs, and which gradients that changes."""

import pytest
import torch
from torch import nn

import fp8_common
import fp8_torch_fsdp as f8

RECIPES = ["tensorwise", "tensorwise_delayed", "rowwise", "rowwise_with_gw_hp", "blockwise"]
ROWS, COLUMNS, OUT = 384, 256, 128


def dense(config):
    layer = f8.convert_to_float8_training(nn.Sequential(nn.Linear(COLUMNS, OUT, bias=False)), config=config)
    return layer, layer[0].weight


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.stack = nn.Parameter(torch.randn(4, OUT, COLUMNS) / COLUMNS**0.5)


def experts(config):
    layout = {
        Stack: f8.ExpertLayout(
            forward=lambda own, x, offsets: own.grouped_product("stack", x, offsets), weights=("stack",)
        )
    }
    model = f8.convert_to_float8_training(Stack(), config=config, experts=layout)
    # an empty expert, and rows behind the last one
    return lambda x: model(x, torch.tensor([100, 100, 250, 380], dtype=torch.int32)), model.stack


def gradients(build, recipe, saved, *, trained=True, compiled=False):
    torch.manual_seed(0)
    run, weight = build(f8.Float8LinearConfig(recipe=recipe, fp8_saved_input=saved))
    weight.requires_grad_(trained)
    # columns of unequal sizes, so that scales of rows, columns and blocks differ
    x = (torch.randn(ROWS, COLUMNS) * torch.logspace(-2, 2, COLUMNS)).requires_grad_()
    if compiled:
        run = torch.compile(run, backend="aot_eager")
    kept = []  # no other tensor has as many elements
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y = run(x)
    y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(1)))
    return weight.grad, x.grad, [t for t in kept if t.numel() == x.numel()]


@pytest.mark.parametrize("build", [dense, experts])
@pytest.mark.parametrize("recipe", RECIPES)
def test_one_byte_per_element_is_kept_and_the_gradients_stay(build, recipe):
    wide, wide_x, before = gradients(build, recipe, False)
    low, low_x, after = gradients(build, recipe, True)
    assert [t.dtype for t in after] == [torch.float8_e4m3fn]
    one_cast = "tensorwise" in recipe
    assert [t.dtype for t in before] == [torch.float8_e4m3fn if one_cast else torch.float32]
    assert torch.equal(low_x, wide_x)
    assert torch.equal(low, wide) == (recipe != "rowwise_with_gw_hp")


def test_a_product_in_high_precision_takes_decoded_codes():
    grad, _, _ = gradients(dense, "rowwise_with_gw_hp", True)
    torch.manual_seed(0)
    nn.Linear(COLUMNS, OUT, bias=False)
    x = torch.randn(ROWS, COLUMNS) * torch.logspace(-2, 2, COLUMNS)
    cast = fp8_common.get_recipe("rowwise_with_gw_hp").input
    codes, scale = fp8_common.quantize_rowwise(x.numpy(), cast.format, policy=cast.policy)
    decoded = torch.from_numpy(fp8_common.dequantize(codes, scale, cast.format))
    dy = torch.randn(ROWS, OUT, generator=torch.Generator().manual_seed(1))
    assert torch.equal(grad, dy.t() @ decoded)


@pytest.mark.parametrize("recipe", RECIPES)
def test_compiled_layers_have_the_same_gradients(recipe):
    for one, other in zip(
        gradients(dense, recipe, True)[:2], gradients(dense, recipe, True, compiled=True)[:2], strict=True
    ):
        assert torch.equal(one, other)


@pytest.mark.parametrize("saved", [False, True])
@pytest.mark.parametrize("recipe", RECIPES)
def test_nothing_is_kept_of_inputs_of_frozen_weights(recipe, saved):
    _, grad, kept = gradients(dense, recipe, saved, trained=False)
    assert kept == []
    assert torch.isfinite(grad).all()
