"""Operands and the three matmuls of a linear layer, against the same matmuls written out with NumPy's casts."""

import dataclasses
import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import fp8_common as f8
from fp8_common import CastRecipe, Fp8Error, Recipe
from fp8_common.torch.quantized import Quantized
from fp8_common.torch_layers.linear import matmul, plan
from fp8_common.torch_layers.linear.config import LinearConfig
from fp8_common.torch_layers.linear.function import LinearSpec, fp8_linear
from fp8_common.torch_layers.sharding.scale_grid import ScaleGrid

ROWS, IN, OUT = 24, 40, 16


def spec_of(config, **options):
    """Return a layer whose weight is quantized when it is needed."""
    grid = ScaleGrid(config.weight)

    def weight(weight, record, both=False):
        return grid.quantize_whole(weight)

    return LinearSpec(config, weight, name="Layer", **options)


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
        plain = f8.numerics.decode(codes, recipe.weight.format)
        dx = rounded(dy * f8.numerics.reciprocal(scale).T, recipe.grad_output) @ plain
    else:
        dx = rounded(dy, recipe.grad_output) @ rounded(w, recipe.weight)
    x_cast = recipe.input_for_grad_weight or recipe.input
    dy_cast = recipe.grad_output_for_grad_weight or recipe.grad_output
    dw = rounded(np.ascontiguousarray(dy.T), dy_cast) @ rounded(np.ascontiguousarray(x.T), x_cast).T
    return y, dx, dw


RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp", "blockwise")


@pytest.mark.parametrize("recipe", RECIPES)
def test_matmuls_are_those_of_numpys_casts(recipe):
    rng = np.random.default_rng(0)
    x, w, dy = (rng.standard_normal(s).astype(np.float32) for s in ((ROWS, IN), (OUT, IN), (ROWS, OUT)))
    tx, tw = torch.from_numpy(x).requires_grad_(), torch.from_numpy(w).requires_grad_()
    y = fp8_linear(tx, tw, spec_of(LinearConfig(recipe=recipe)))
    y.backward(torch.from_numpy(dy))
    # operands are equal bit for bit; only the order of accumulation differs
    for got, want in zip((y, tx.grad, tw.grad), written_out(x, w, dy, f8.recipe.get_recipe(recipe)), strict=True):
        np.testing.assert_allclose(got.detach().numpy(), want, rtol=2e-5, atol=2e-5)


class Multiplied(TorchDispatchMode):
    """Records the dtype of the operands of each matmul."""

    def __init__(self):
        super().__init__()
        self.dtypes = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.mm.default:
            self.dtypes.append(args[0].dtype)
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("units", [True, False])
@pytest.mark.parametrize("ends", [None, [32, 64]], ids=["linear", "experts"])
@pytest.mark.parametrize("recipe", [*RECIPES, "mxfp8"])
def test_bfloat16_is_multiplied_where_the_processor_has_units_for_it(monkeypatch, recipe, ends, units):
    """Without them a matmul in bfloat16 takes 5 to 9 times as long as one in float32, or more."""
    if ends and recipe == "mxfp8":
        pytest.skip("there are no experts in MX")
    monkeypatch.setattr(matmul, "multiplies_bfloat16", lambda: units)
    config = LinearConfig(recipe=recipe)
    grid, offsets = ScaleGrid(config.weight, stacked=bool(ends)), torch.tensor(ends) if ends else None
    spec = LinearSpec(config, lambda w, *_: grid.quantize_whole(w))
    x, w, dy = (torch.randn(shape).bfloat16() for shape in ((64, 96), (32, 96), (64, 32)))
    w = torch.stack([w, -w]) if ends else w

    def made_in(dtype):
        leaves = [t.to(dtype, copy=True).requires_grad_() for t in (x, w)]
        with Multiplied() as seen:
            y = fp8_linear(*leaves, spec, offsets)
            y.backward(dy.to(dtype))
        return seen.dtypes, [t.bfloat16() for t in (y, *(leaf.grad for leaf in leaves))]

    dtypes, results = made_in(torch.bfloat16)
    wide = "gw_hp" in recipe  # dw, the last matmul, is then that of a layer without FP8
    emulated = torch.float32 if recipe == "blockwise" or not units else torch.bfloat16
    assert dict.fromkeys(dtypes) == dict.fromkeys([emulated, torch.bfloat16] if wide else [emulated])
    if emulated == torch.float32:  # sums are rounded once
        assert all(map(torch.equal, results[: 2 if wide else 3], made_in(torch.float32)[1]))


def test_only_requested_gradients_are_computed():
    x, w = torch.randn(ROWS, IN), torch.randn(OUT, IN)
    for needs in itertools.product((True, False), repeat=2):
        own = [t.clone().requires_grad_(need) for t, need in zip((x, w), needs, strict=True)]
        y = fp8_linear(*own, spec_of(LinearConfig()))
        if any(needs):
            y.sum().backward()
        assert [t.grad is not None for t in own] == list(needs)


def test_matmuls_are_differentiated_once():
    x, w = torch.randn(ROWS, IN, requires_grad=True), torch.randn(OUT, IN)
    (first,) = torch.autograd.grad(fp8_linear(x, w, spec_of(LinearConfig())).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


def gradients(spec, function=fp8_linear, rows=(ROWS,), **options):
    generator = torch.Generator().manual_seed(0)
    x, w, grad = (torch.randn(s, generator=generator) for s in ((*rows, IN), (OUT, IN), (*rows, OUT)))
    y = function(x.requires_grad_(), w.requires_grad_(), spec, **options)
    y.backward(grad)
    return y.detach(), x.grad, w.grad


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_gathered_weight_is_gathered_for_each_matmul(recipe):
    here, calls = spec_of(LinearConfig(recipe=recipe)), []
    gather = SimpleNamespace(
        send=lambda weight: (weight,),
        start=lambda sent, grad: calls.append("gather" if grad is None else "gather again") or sent[0],
        finish=here.weight_operand,
        start_reduce=lambda grad: calls.append("reduce") or grad,
        finish_reduce=lambda started: calls.append("reduced") or started,
    )
    assert all(map(torch.equal, gradients(dataclasses.replace(here, gather=gather)), gradients(here)))
    assert calls == ["gather", "gather again", "reduce", "reduced"]


@pytest.mark.parametrize("recipe", RECIPES)
def test_codes_of_the_forward_serve_the_backward_where_they_stay_in_memory(recipe):
    casts = []
    spec = spec_of(LinearConfig(recipe=recipe))
    counted = dataclasses.replace(
        spec, weight_operand=lambda w, record, both: casts.append(record) or spec.weight_operand(w, record)
    )
    wanted = gradients(counted, record=True)
    assert casts == [True, False], "delayed scaling observes the weight once"
    assert all(map(torch.equal, gradients(counted, keep_codes=True), wanted))
    assert len(casts) == 3


def test_who_watches_sees_the_operands_of_activation_and_gradient():
    seen = []
    spec = spec_of(LinearConfig(), watch=lambda name, x, operand: seen.append((name, x.shape, operand.codes.shape)))
    gradients(spec)
    assert seen == [("input", (ROWS, IN), (ROWS, IN)), ("grad_output", (ROWS, OUT), (ROWS, OUT))]


@pytest.mark.parametrize("shape", [(), (3,), (2, IN + 1)])
def test_inputs_that_do_not_fit_raise(shape):
    with pytest.raises(Fp8Error, match=rf"Layer expects \[\.\.\., {IN}\] as input, got"):
        fp8_linear(torch.zeros(shape), torch.zeros(OUT, IN), spec_of(LinearConfig()))


OFF = CastRecipe(scaling="disabled")


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        ("fp4", "Unknown recipe 'fp4'. Use one of tensorwise, "),
        (Recipe(name="r", weight_for_grad_input=CastRecipe()), "Recipe 'r': weight_for_grad_input is not supported"),
        (Recipe(name="r", input=OFF, weight=OFF, grad_output=OFF), "Recipe 'r': input cannot be cast with disabled"),
        (3, "A recipe is a name"),
    ],
)
def test_unsupported_recipes_raise(recipe, message):
    with pytest.raises(Fp8Error, match=message):
        LinearConfig(recipe=recipe)


def test_recipes_are_names_objects_or_dictionaries():
    named = LinearConfig(recipe="rowwise")
    assert LinearConfig(recipe=named.recipe.to_dict()) == LinearConfig(recipe=named.recipe) == named
    assert dataclasses.replace(named, pad_inner_dim=True).recipe == named.recipe


FLOAT32, BFLOAT16, GPU = torch.float32, torch.bfloat16, torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("gpu", "capability", "cuda", "rowwise", "before", "from_2_15"),
    [
        ("H100", (9, 0), "12.9", True, FLOAT32, FLOAT32),
        ("H100, CUDA 12.8", (9, 0), "12.8", True, BFLOAT16, FLOAT32),
        ("RTX 4090, L40S", (8, 9), "13.0", True, BFLOAT16, FLOAT32),
        ("B200", (10, 0), "13.0", True, BFLOAT16, FLOAT32),
        ("RTX 5090", (12, 0), "13.0", True, BFLOAT16, FLOAT32),
        ("unknown", (14, 0), "13.0", True, None, None),
        ("RTX 4090", (8, 9), "13.0", False, FLOAT32, FLOAT32),
        ("RTX 5090", (12, 0), "13.0", False, FLOAT32, FLOAT32),
        ("unknown", (14, 0), "13.0", False, FLOAT32, FLOAT32),
    ],
)
@pytest.mark.parametrize("out_dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("all_dtypes", [False, True])
def test_library_for_scales_of_rows(
    monkeypatch, gpu, capability, cuda, rowwise, before, from_2_15, out_dtype, all_dtypes
):
    """CUTLASS, which multiplies with scales of rows off Hopper, writes bfloat16 alone before torch 2.15.

    It writes these bits for float16, too, and says nothing; on Hopper it multiplies before CUDA 12.9.
    """
    made_in = from_2_15 if all_dtypes else before
    made_in = out_dtype if made_in == torch.float32 else made_in
    asked = []
    codes = torch.ones(16, 16).to(torch.float8_e4m3fn)
    scale_inv = torch.ones(16, 1) if rowwise else torch.ones(())

    def scaled_mm(a, b, a_inv, b_inv, scaling, *, out_dtype, use_fast_accum):
        asked.append(out_dtype)
        assert scaling == (("RowWise" if rowwise else "TensorWise"),) * 2
        return (a.float() @ b.float()).to(out_dtype)

    monkeypatch.setattr(matmul, "scaled_mm", scaled_mm)
    monkeypatch.setattr(matmul, "device_capability", lambda device: capability)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(matmul, "_on_cuda", lambda tensor: True)
    monkeypatch.setattr(matmul, "ROWS_INTO_ALL_DTYPES", all_dtypes)
    operand = Quantized(codes, scale_inv, f8.E4M3)
    options = plan.options(LinearConfig(recipe="rowwise", emulate=False), "output", out_dtype, GPU, grouped=False)
    y = matmul.matmul(operand, operand, options)
    assert asked == ([] if made_in is None else [made_in])
    assert y.dtype == out_dtype
    assert (y == 16).all()


@pytest.mark.parametrize(("capability", "native"), [((9, 0), True), ((8, 9), False), ((12, 0), False)])
def test_cutlass_takes_no_e5m2_as_second_operand(monkeypatch, capability, native):
    """It raises; a recipe with E5M2 inputs would have ended in the gradient of the weight."""
    calls = []
    monkeypatch.setattr(matmul, "scaled_mm", lambda a, b, *rest, **options: calls.append(1) or (a.float() @ b.float()))
    monkeypatch.setattr(matmul, "device_capability", lambda device: capability)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(matmul, "_on_cuda", lambda tensor: True)
    a = Quantized(torch.ones(16, 16).to(torch.float8_e4m3fn), torch.ones(16, 1), f8.E4M3)
    b = Quantized(torch.ones(16, 16).to(torch.float8_e5m2), torch.ones(16, 1), f8.E5M2)
    options = plan.options(LinearConfig(recipe="rowwise", emulate=False), "grad_weight", FLOAT32, GPU, grouped=False)
    assert (matmul.matmul(a, b, options) == 16).all()
    assert bool(calls) is native
    calls.clear()
    assert (matmul.matmul(b, a, options) == 16).all()
    assert calls, "the first may be E5M2"


@pytest.mark.matrix("each", recipe=RECIPES, saved=[True, False])
def test_compiled_layers_are_one_graph_with_the_same_bits(recipe, saved):
    spec = spec_of(LinearConfig(recipe=recipe, fp8_saved_input=saved))
    compiled = torch.compile(fp8_linear, backend="aot_eager", fullgraph=True)
    results = [gradients(spec, function, rows=(2, ROWS), record=True) for function in (fp8_linear, compiled)]
    assert all(map(torch.equal, *results))
