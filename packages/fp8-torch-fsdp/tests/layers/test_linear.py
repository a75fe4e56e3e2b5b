"""One process: what a converted layer computes, keeps and refuses."""

import copy
import types

import pytest
import torch
from torch import nn

import fp8_torch_fsdp as f8
from fp8_common import Fp8Error, Fp8UnsupportedError
from fp8_common.torch_layers.linear.matmul import MatmulOptions, matmul
from fp8_common.torch_layers.linear.operand import quantize_operand
from fsdp_models import RECIPES, Conv1D, Experts, converted, seeded
from fsdp_training import batch


def plain():
    return nn.Linear(256, 192)


def layer(recipe="tensorwise", **options):
    return converted(seeded(plain), recipe, **options)


def run(model, x, upstream):
    x = x.detach().clone().requires_grad_()
    y = model(x)
    y.backward(upstream)
    return y, x.grad, model.weight.grad


# ---------------------------------------------------------------- numbers


@pytest.mark.parametrize("granularity", ["tensorwise", "rowwise"])
def test_emulated_matmuls_agree_with_the_scaled_matmul(granularity):
    """`scaled_mm` of a CPU multiplies the same operands."""
    if granularity == "rowwise" and torch.__version__ < "2.13":
        pytest.skip("torch takes row scales on CPU from torch 2.13 on")
    a, b = (quantize_operand(torch.randn(n, 64), f8.CastRecipe(granularity=granularity)) for n in (48, 32))
    emulated, native = (matmul(a, b, MatmulOptions(torch.float32, emulate=emulate)) for emulate in (True, False))
    torch.testing.assert_close(emulated, native, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_weight_that_is_stored_transposed_has_the_numbers_of_a_linear_layer(recipe):
    stored, linear = seeded(lambda: Conv1D(48, 160)), nn.Linear(160, 48)
    linear.load_state_dict({"weight": stored.weight.t(), "bias": stored.bias})
    low, wanted = converted(stored, recipe), converted(linear, recipe)
    assert isinstance(low, Conv1D)
    x, upstream = torch.randn(2, 5, 160), torch.randn(2, 5, 48)
    (y, grad_x, grad_w), expected = run(low, x, upstream), run(wanted, x, upstream)
    assert all(map(torch.equal, (y, grad_x, grad_w.t()), expected))
    assert type(f8.unconvert(low)) is Conv1D
    assert f8.float8_report(nn.Sequential(low)).weights[0].class_name == "Conv1D"


def test_rows_stand_for_themselves_and_may_be_none():
    low, x = layer(), torch.randn(8, 256)
    x[3, 5] = torch.nan
    assert low(x).isfinite().all(1).tolist() == [True] * 3 + [False] + [True] * 4
    empty = torch.randn(0, 256, requires_grad=True)
    low(empty).sum().backward()
    assert not low.weight.grad.any()


def test_autocast_computes_in_its_dtype():
    with torch.autocast("cpu", torch.bfloat16):
        assert layer()(torch.randn(4, 256)).dtype == torch.bfloat16


# ---------------------------------------------------------------- what the backward keeps

ROWS, COLUMNS, OUT = 384, 256, 128


KINDS = {
    "dense": (lambda: nn.Linear(COLUMNS, OUT, bias=False), ()),
    # an empty expert, and rows behind the last one
    "experts": (lambda: Experts(4, stack=(OUT, COLUMNS)), (torch.tensor([100, 100, 250, 380], dtype=torch.int32),)),
}


def gradients(kind, recipe, saved):
    make, offsets = KINDS[kind]
    model = converted(seeded(make), recipe, fp8_saved_input=saved)
    # columns of unequal sizes, so that scales of rows, columns and blocks differ
    x = (batch(0, 0, (ROWS, COLUMNS)) * torch.logspace(-2, 2, COLUMNS)).requires_grad_()
    kept = []  # no other tensor has as many elements
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y = model(x, *offsets)
    y.backward(batch(0, 1, y.shape))
    (weight,) = model.parameters()
    return weight.grad, x.grad, [t.dtype for t in kept if t.numel() == x.numel()]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_one_byte_per_element_is_kept_and_the_gradients_stay(kind, recipe):
    wide, wide_x, before = gradients(kind, recipe, False)
    low, low_x, after = gradients(kind, recipe, True)
    assert after == [torch.float8_e4m3fn]
    assert before == [torch.float8_e4m3fn if "tensorwise" in recipe else torch.float32]
    assert torch.equal(low_x, wide_x)
    assert torch.equal(low, wide) == (recipe != "rowwise_with_gw_hp")


# ---------------------------------------------------------------- words


def configured(**options):
    return lambda: f8.Float8TrainingConfig(**options)


def given(**options):
    return lambda: f8.convert_to_float8_training(nn.Sequential(nn.Linear(32, 32)), **options)


def torchaos():
    return type("Float8LinearConfig", (types.SimpleNamespace,), {"__module__": "torchao.float8.config"})()


ONES = torch.ones(2, 256)
REFUSED = [
    (lambda: converted(nn.ReLU()), Fp8Error, "No nn.Linear"),
    (lambda: converted(nn.Sequential(nn.LazyLinear(8))), Fp8Error, "0 has no weight yet: run the model once"),
    (lambda: converted(nn.Conv1d(2, 2, 2)), Fp8Error, r"Conv1d \(1 parameter,"),
    (given(recipe="nope"), Fp8Error, "Unknown recipe 'nope'"),
    (given(recipe="tensorwise", config=f8.Float8TrainingConfig()), Fp8Error, "not both"),
    (given(config="rowwise"), Fp8Error, "recip"),
    (given(recipee="rowwise"), Fp8Error, "has no argument 'recipee'. It takes config, recipe"),
    (given(config=torchaos()), Fp8Error, r"got torchao\.float8\.config\.Float8LinearConfig\. .*from_torchao\(config\)"),
    (configured(emulate="yes"), Fp8Error, "emulate must be"),
    (configured(all_gather="step"), Fp8Error, "True or False"),
    (lambda: layer()(torch.randn(4, 255)), Fp8Error, r"\[..., 256\]"),
    (lambda: layer()(3.0), Fp8Error, "expects a tensor"),
    (lambda: torch.func.vmap(layer())(ONES), Fp8UnsupportedError, r"torch\.func"),
    (lambda: torch.func.jvp(layer(), (ONES,), (ONES,)), Fp8UnsupportedError, r"torch\.func"),
    (lambda: layer(emulate=False)(ONES), Fp8UnsupportedError, "cannot multiply|no FP8 matmuls"),
]


@pytest.mark.parametrize(("call", "error", "message"), REFUSED, ids=[message for *_, message in REFUSED])
def test_what_cannot_work_says_what_and_what_to_do(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_flatten_unflatten_detach_and_clone_lose_the_scale():
    """They did in torchao: every alias is the same weight here, and a clone is one of its own."""
    weight = layer().weight
    names, context = weight.__tensor_flatten__()
    inner = {name: getattr(weight, name) for name in names}
    rebuilt = type(weight).__tensor_unflatten__(inner, context, weight.shape, weight.stride())
    assert all(
        alias.fp8_weight is weight.fp8_weight for alias in (rebuilt, weight.detach(), weight.view(-1), weight[1:])
    )
    for own in (weight.clone(), copy.deepcopy(weight)):
        assert own.fp8_weight is not weight.fp8_weight
        with torch.no_grad():
            own.zero_()
    assert weight.plain.any()
