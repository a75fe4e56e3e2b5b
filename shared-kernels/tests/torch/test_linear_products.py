"""Operands and the three products of a linear layer, against the same products written out with NumPy's casts."""

import dataclasses
import itertools

import numpy as np
import pytest
import torch

import fp8_common as f8
from fp8_common import CastRecipe, Fp8Error, Recipe
from fp8_common.torch import _multiply
from fp8_common.torch.plugin import LinearConfig, LinearOperands, Operand, ScaleLayout, WeightAccess, dispatch

ROWS, IN, OUT = 24, 40, 16


class Layer(LinearOperands):
    """A layer whose weight is cast when it is needed."""

    def __init__(self, config):
        self.config = config

    def weight_operand(self, weight, *, record):
        layout = ScaleLayout.of(self.config.weight)
        codes, scale = layout.cast_whole(weight)[:2]
        return Operand(codes, dispatch.reciprocal(scale), layout.fmt, layout.block)


def rounded(x, cast):
    """Return what the cast of a matrix whose contracted dimension is the last stands for, float32."""
    if not cast.enabled:
        return x
    if cast.granularity == "rowwise":
        data, scale = f8.quantize_rowwise(x, cast.format, -1, cast.policy)
    elif cast.granularity.startswith("blockwise"):
        block = (1, 128) if cast.granularity.endswith("1x128") else (128, 128)
        data, scale = f8.quantize_blockwise(x, cast.format, block, cast.policy)
        return f8.dequantize_blockwise(data, scale, cast.format, block)
    else:
        scale = f8.amax_to_scale(f8.amax(x), cast.format, cast.policy)
        data = f8.quantize(x, scale, cast.format)
    return f8.dequantize(data, scale, cast.format)


def written_out(x, w, dy, recipe):
    """Return y = x w^T, dx = dy w, dw = dy^T x with each operand cast along the dimension that is contracted."""
    y = rounded(x, recipe.input) @ rounded(w, recipe.weight).T
    if recipe.weight.granularity == "rowwise":
        codes, scale = f8.quantize_rowwise(w, recipe.weight.format, -1, recipe.weight.policy)
        plain = f8.decode(codes, recipe.weight.format)
        dx = rounded(dy * f8.reciprocal(scale).T, recipe.grad_output) @ plain
    else:
        dx = rounded(dy, recipe.grad_output) @ rounded(w, recipe.weight)
    x_cast = recipe.input_for_grad_weight or recipe.input
    dy_cast = recipe.grad_output_for_grad_weight or recipe.grad_output
    dw = rounded(np.ascontiguousarray(dy.T), dy_cast) @ rounded(np.ascontiguousarray(x.T), x_cast).T
    return y, dx, dw


RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp", "blockwise")


@pytest.mark.parametrize("recipe", RECIPES)
def test_products_are_those_of_numpys_casts(recipe):
    rng = np.random.default_rng(0)
    x, w, dy = (rng.standard_normal(s).astype(np.float32) for s in ((ROWS, IN), (OUT, IN), (ROWS, OUT)))
    tx, tw = torch.from_numpy(x).requires_grad_(), torch.from_numpy(w).requires_grad_()
    y = Layer(LinearConfig(recipe=recipe)).product(tx, tw)
    y.backward(torch.from_numpy(dy))
    # operands are equal bit for bit; only the order of accumulation differs
    for got, want in zip((y, tx.grad, tw.grad), written_out(x, w, dy, f8.get_recipe(recipe)), strict=True):
        np.testing.assert_allclose(got.detach().numpy(), want, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(
    ("recipe", "saved"), [("tensorwise", torch.float8_e4m3fn), ("rowwise", torch.float32), ("blockwise", torch.float32)]
)
def test_the_backward_keeps_codes_where_one_cast_serves_twice(recipe, saved):
    kept = []
    x, w = torch.randn(ROWS, IN, requires_grad=True), torch.randn(OUT, IN, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        Layer(LinearConfig(recipe=recipe)).product(x, w)
    assert [t.dtype for t in kept if t.shape == (ROWS, IN)] == [saved]


def test_only_the_gradients_that_are_asked_for_are_made():
    x, w = torch.randn(ROWS, IN), torch.randn(OUT, IN)
    for needs in itertools.product((True, False), repeat=2):
        own = [t.clone().requires_grad_(need) for t, need in zip((x, w), needs, strict=True)]
        y = Layer(LinearConfig()).product(*own)
        if any(needs):
            y.sum().backward()
        assert [t.grad is not None for t in own] == list(needs)


def test_products_are_differentiated_once():
    x, w = torch.randn(ROWS, IN, requires_grad=True), torch.randn(OUT, IN)
    (first,) = torch.autograd.grad(Layer(LinearConfig()).product(x, w).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


class Counted(WeightAccess):
    """Counts in which order a weight is gathered and its gradient goes away."""

    def __init__(self):
        self.calls = []

    def start_weight(self, layer, sent, grad):
        self.calls.append("gather again" if grad is not None else "gather")
        return super().start_weight(layer, sent, grad)

    def start_gradient(self, layer, grad_weight):
        self.calls.append("reduce")
        return super().start_gradient(layer, grad_weight)

    def finish_gradient(self, layer, started):
        self.calls.append("reduced")
        return super().finish_gradient(layer, started)


def test_a_weight_that_travels_is_gathered_for_each_product():
    access, x, w = Counted(), torch.randn(ROWS, IN, requires_grad=True), torch.randn(OUT, IN, requires_grad=True)
    Layer(LinearConfig()).product(x, w, access=access).sum().backward()
    assert access.calls == ["gather", "gather again", "reduce", "reduced"]


@pytest.mark.parametrize("shape", [(), (3,), (2, IN + 1)])
def test_inputs_that_do_not_fit_are_refused(shape):
    with pytest.raises(Fp8Error, match=rf"Layer expects \[\.\.\., {IN}\] as input, got"):
        Layer(LinearConfig()).product(torch.zeros(shape), torch.zeros(OUT, IN))


OFF = CastRecipe(scaling="disabled")


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        ("fp4", "Unknown recipe 'fp4'. Use one of tensorwise, "),
        ("mx", "Recipe 'mx': input cannot be cast with dynamic mx scaling here"),
        (Recipe(name="r", weight_for_grad_input=CastRecipe()), "Recipe 'r': weight_for_grad_input cannot be honoured"),
        (Recipe(name="r", input=OFF, weight=OFF, grad_output=OFF), "Recipe 'r': input cannot be cast with disabled"),
        (3, "A recipe is a name"),
    ],
)
def test_recipes_that_cannot_be_honoured_are_refused(recipe, message):
    with pytest.raises(Fp8Error, match=message):
        LinearConfig(recipe=recipe)


def test_recipes_are_names_objects_or_dictionaries():
    named = LinearConfig(recipe="rowwise")
    assert LinearConfig(recipe=named.recipe.to_dict()) == LinearConfig(recipe=named.recipe) == named
    assert dataclasses.replace(named, pad_inner_dim=True).recipe == named.recipe


@pytest.mark.parametrize(
    ("hip", "capability", "emulated"), [(None, (8, 9), False), (None, (8, 0), True), ("6.4", (9, 0), True)]
)
def test_products_are_emulated_off_nvidia(monkeypatch, hip, capability, emulated):
    device = torch.device("cuda", 0)
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(_multiply, "_look_up", _multiply._look_up.__wrapped__)  # without what earlier tests asked
    assert _multiply.should_emulate(device, LinearConfig()) is emulated
