"""Layers with FP8 primary weights: how they are made, what they compute, what a write to them means."""

import dataclasses
import io

import pytest
import torch
from torch import nn

import fp8_te_init as fti
from fp8_common import CastRecipe, Fp8Error, Recipe, get_recipe
from fp8_common.torch import amax, amax_to_scale, dequantize, quantize, quantize_blockwise, quantize_rowwise

RECIPES = ["tensorwise", "tensorwise_delayed", "rowwise", "rowwise_with_gw_hp", "blockwise"]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def built(recipe="tensorwise", dtype=torch.float32, shape=(40, 24), preserve=True, **options) -> nn.Linear:
    torch.manual_seed(0)
    with fti.fp8_model_init(recipe=recipe, preserve_high_precision_init_val=preserve, **options):
        return nn.Linear(shape[1], shape[0], dtype=dtype)


def plain(dtype=torch.float32, shape=(40, 24)) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(shape[1], shape[0], dtype=dtype)


def reference_codes(weight, recipe):
    """Codes and scales by the public functions of fp8_common."""
    if recipe.startswith("rowwise"):
        policy = fti.LinearConfig(recipe=get_recipe(recipe)).weight.policy
        return quantize_rowwise(weight, "e4m3", -1, policy)
    if recipe == "blockwise":
        return quantize_blockwise(weight, "e4m3", (128, 128))
    scale = amax_to_scale(amax(weight), "e4m3")
    return quantize(weight, scale, "e4m3"), scale


@pytest.mark.matrix(recipe=RECIPES, dtype=DTYPES, shape=[(40, 24), (130, 129), (1, 16), (7, 1)])
def test_the_copy_is_the_value_before_rounding_and_gives_the_codes(recipe, dtype, shape):
    layer, twin = built(recipe, dtype, shape), plain(dtype, shape)
    copy = layer.weight.get_high_precision_init_val()
    assert copy.dtype == dtype
    assert torch.equal(copy, twin.weight)
    codes, scale = reference_codes(twin.weight.detach(), recipe)
    assert torch.equal(layer.weight.codes.view(torch.uint8), codes.view(torch.uint8))
    assert torch.equal(layer.weight.scale, scale)
    assert torch.equal(layer.bias, twin.bias)
    assert layer.weight.dtype == dtype


def test_a_converted_model_equals_one_that_was_built():
    converted = fti.convert_linear(plain())
    layer = built()
    assert isinstance(converted, fti.PrimaryFloat8Linear)
    assert torch.equal(converted.weight.codes.view(torch.uint8), layer.weight.codes.view(torch.uint8))
    assert torch.equal(converted.weight.get_high_precision_init_val(), layer.weight.get_high_precision_init_val())


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_forward_and_backward_are_near_those_of_high_precision(recipe, dtype):
    layer, twin = built(recipe, dtype, (64, 48)), plain(dtype, (64, 48))
    x = torch.randn(3, 32, 48).to(dtype)
    grad = torch.randn(3, 32, 64).to(dtype)
    results = []
    for module in (layer, twin):
        leaf = x.clone().requires_grad_()
        y = module(leaf)
        y.backward(grad)
        results.append([y, leaf.grad, module.weight.grad, module.bias.grad])
    for ours, exact in zip(*results, strict=True):
        assert type(ours) is torch.Tensor
        assert ours.dtype == dtype
        error = (ours.float() - exact.float()).norm() / exact.float().norm()
        assert error < 0.06, "two operands of 3 or 2 mantissa bits: a few percent"


def test_the_forward_uses_the_codes_and_nothing_finer():
    layer = built(shape=(64, 48))
    x = torch.randn(8, 48)
    scale = amax_to_scale(amax(x), "e4m3")
    x8 = dequantize(quantize(x, scale, "e4m3"), scale, "e4m3")
    expected = x8 @ layer.weight.dequantize().t() + layer.bias
    assert torch.allclose(layer(x), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "init",
    [
        lambda w: nn.init.normal_(w, 0.0, 0.02),
        lambda w: nn.init.trunc_normal_(w, std=0.02),
        lambda w: nn.init.kaiming_uniform_(w, a=5**0.5),
        lambda w: nn.init.xavier_normal_(w),
        lambda w: nn.init.constant_(w, 0.3),
        lambda w: nn.init.zeros_(w),
        lambda w: nn.init.orthogonal_(w),
    ],
    ids=["normal", "trunc_normal", "kaiming_uniform", "xavier_normal", "constant", "zeros", "orthogonal"],
)
def test_every_initialisation_function_works_on_the_weight(init):
    layer, twin = built(), plain()
    for weight in (layer.weight, twin.weight):
        torch.manual_seed(7)
        init(weight)
    assert torch.equal(layer.weight.get_high_precision_init_val(), twin.weight)
    assert torch.equal(layer.weight.scale, reference_codes(twin.weight.detach(), "tensorwise")[1])


def test_a_write_to_a_part_changes_that_part():
    layer, twin = built(), plain()
    with torch.no_grad():
        for weight in (layer.weight, twin.weight):
            weight[3].zero_()
            weight[:, 5:7] *= 2.0
            weight.data[1, 1] = 0.125
    assert torch.equal(layer.weight.get_high_precision_init_val(), twin.weight)
    assert layer.weight.dequantize()[3].count_nonzero() == 0


def test_reading_gives_dequantized_values_and_new_tensors_are_plain():
    weight = built().weight.detach()
    values = weight.dequantize()
    for read in (weight.float(), weight + 0, weight.t().t() + 0, weight[2:5].clone(), weight.reshape(-1).clone()):
        assert type(read) is torch.Tensor or read.dequantize().equal(values.reshape(read.shape))
    assert type(torch.zeros_like(weight)) is torch.Tensor
    assert type(weight.double()) is torch.Tensor
    assert torch.equal(weight.double(), values.double())
    assert torch.equal(weight[2:5] + 0, values[2:5])
    assert torch.equal(weight.t() + 0, values.t())


def test_an_optimizer_without_masters_trains_the_weight_itself():
    layer = built(preserve=False)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.5)
    before = layer.weight.dequantize()
    layer(torch.randn(16, 24)).square().mean().backward()
    grad = layer.weight.grad.clone()
    optimizer.step()
    expected = quantize(before - 0.5 * grad, amax_to_scale(amax(before - 0.5 * grad), "e4m3"), "e4m3")
    assert torch.equal(layer.weight.codes.view(torch.uint8), expected.view(torch.uint8))


# ---------------------------------------------------------------- the context


def test_nesting_disabling_and_exceptions():
    with fti.fp8_model_init(recipe="tensorwise", preserve_high_precision_init_val=True):
        with fti.fp8_model_init(recipe="blockwise", preserve_high_precision_init_val=True):
            inner = nn.Linear(8, 8)
        with fti.fp8_model_init(enabled=False):
            off = nn.Linear(8, 8)
        with (
            pytest.raises(RuntimeError, match="stop"),
            fti.fp8_model_init(recipe="rowwise", preserve_high_precision_init_val=True),
        ):
            raise RuntimeError("stop")
        outer = nn.Linear(8, 8)
    after = nn.Linear(8, 8)
    assert inner.config.weight.granularity == "blockwise_128x128"
    assert outer.config.weight.granularity == "tensorwise"
    assert type(off) is type(after) is nn.Linear
    assert type(off.weight) is nn.Parameter


def test_an_exception_inside_restores_and_leaves_no_hook():
    hooks = nn.modules.module._global_parameter_registration_hooks
    before = list(hooks)  # deferred layers of other tests leave one
    with pytest.raises(ZeroDivisionError), fti.fp8_model_init(preserve_high_precision_init_val=True):
        nn.Linear(4, 1 // 0)
    assert type(nn.Linear(4, 4)) is nn.Linear
    assert list(hooks) == before


def test_fp8_model_init_has_the_signature_and_meaning_of_its_model():
    with fti.fp8_model_init(enabled=True, recipe=None, preserve_high_precision_init_val=True):
        kept = nn.Linear(8, 8)
        with fti.fp8_model_init(enabled=False):
            off = nn.Linear(8, 8)
    with fti.fp8_model_init():
        forgotten = nn.Linear(8, 8)
    assert kept.weight.get_high_precision_init_val().shape == (8, 8)
    assert forgotten.weight.get_high_precision_init_val() is None
    assert isinstance(forgotten, fti.PrimaryFloat8Linear)
    assert type(off) is nn.Linear


def test_only_plain_linear_layers_are_taken():
    class Own(nn.Linear):
        def forward(self, x):
            return super().forward(x) * 2

    with fti.fp8_model_init(preserve_high_precision_init_val=True):
        own, attention = Own(8, 8), nn.MultiheadAttention(8, 2)
    assert type(own) is Own
    assert type(own.weight) is nn.Parameter
    attention(*[torch.randn(3, 1, 8)] * 3)


@pytest.mark.parametrize("recipe", RECIPES)
def test_meta_layers_hold_nothing_and_are_initialized_later_with_the_same_values(recipe):
    with torch.device("meta"), fti.fp8_model_init(recipe=recipe, preserve_high_precision_init_val=True):
        layer = nn.Linear(24, 40)
    assert layer.weight.is_meta
    assert layer.weight.codes.is_meta
    layer.to_empty(device="cpu")
    torch.manual_seed(0)
    layer.reset_parameters()
    eager = built(recipe)
    assert torch.equal(layer.weight.get_high_precision_init_val(), eager.weight.get_high_precision_init_val())
    assert torch.equal(layer.weight.codes.view(torch.uint8), eager.weight.codes.view(torch.uint8))
    assert torch.equal(layer.weight.scale, eager.weight.scale)
    assert torch.equal(layer.bias, eager.bias)


# ---------------------------------------------------------------- conversion


def test_tied_weights_stay_tied_and_are_kept_once():
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16), nn.Embedding(16, 16), nn.Linear(16, 16))
    model[1].weight = model[0].weight
    model[3].weight = model[2].weight
    fti.convert_linear(model)
    assert model[0].weight is model[1].weight
    assert model[0].weight.get_high_precision_init_val() is model[1].weight.get_high_precision_init_val()
    assert type(model[3]) is nn.Linear, "an embedding would embed rounded values"


def test_layers_can_be_left_out():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    fti.convert_linear(model, module_filter_fn=lambda module, name: name == "1")
    assert [type(layer) for layer in model] == [nn.Linear, fti.PrimaryFloat8Linear]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: fti.convert_linear(nn.ReLU()), "No nn.Linear layer to convert"),
        (lambda: fti.convert_linear(nn.Linear(4, 4), release="never"), "release must be one of 'seed'"),
        (lambda: fti.convert_linear(nn.Linear(4, 4), recipe="fp4"), "Unknown recipe 'fp4'"),
        (lambda: fti.convert_linear(nn.Linear(4, 4).double()), "is torch.float64: FP8 codes are made of"),
        (lambda: fti.convert_linear(nn.Linear(4, 4), recipe="mxfp8"), "MX weights need TransformerEngine"),
        (lambda: fti.LinearConfig(emulate="yes"), "emulate must be"),
        (
            lambda: fti.convert_linear(
                nn.Linear(4, 4), recipe=Recipe(name="off", weight=CastRecipe(scaling="static", static_scale=2.0))
            ),
            "is dynamic or delayed, not static",
        ),
        (
            lambda: fti.fp8_model_init(preserve_high_precision_init_val=True, backend="gpu").__enter__(),
            "backend must be one of 'auto'",
        ),
        (
            lambda: fti.convert_linear(nn.Linear(4, 4), recipe="rowwise", config=fti.LinearConfig()),
            "Pass recipe or config, not both",
        ),
        (lambda: built()(torch.randn(3, 7)), "expects \\[..., 24\\] as input, got \\(3, 7\\)"),
    ],
)
def test_bad_choices_say_what_they_got_and_what_to_do(call, message):
    with pytest.raises(Fp8Error, match=message):
        call()


def test_what_is_left_out_is_told(caplog):
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    with caplog.at_level("INFO"):
        fti.convert_linear(model, module_filter_fn=lambda module, name: name == "1")
    assert "1 linear layers have FP8 primary weights. Left in high precision: 0 (filtered)." in caplog.text


# ---------------------------------------------------------------- state dicts


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("recipe", RECIPES)
def test_state_dicts_hold_plain_codes_and_scales_and_come_back_bit_for_bit(recipe, assign):
    layer = built(recipe, shape=(130, 129))
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    assert file.tell() < 130 * 129 + 8000, "one byte per element and a few scales: no copy of the start is in there"
    file.seek(0)
    state = torch.load(file, weights_only=True)
    assert state["weight"].dtype == torch.uint8
    assert state["weight_scale_e4m3"].dtype == torch.float32
    torch.manual_seed(1)
    with fti.fp8_model_init(recipe=recipe, preserve_high_precision_init_val=True):
        other = nn.Linear(129, 130)
    other.load_state_dict(state, assign=assign)
    assert isinstance(other.weight, fti.PrimaryFloat8Weight)
    assert torch.equal(other.weight.codes.view(torch.uint8), layer.weight.codes.view(torch.uint8))
    assert torch.equal(other.weight.scale, layer.weight.scale)
    assert torch.equal(other.weight.dequantize(), layer.weight.dequantize())


@pytest.mark.parametrize("assign", [False, True])
def test_a_checkpoint_of_the_unconverted_model_is_quantized_and_becomes_the_start(assign):
    layer, twin = built(), nn.Linear(24, 40)
    layer.load_state_dict(twin.state_dict(), assign=assign)
    assert torch.equal(layer.weight.get_high_precision_init_val(), twin.weight)
    assert torch.equal(layer.weight.scale, reference_codes(twin.weight.detach(), "tensorwise")[1])


def e5m2():
    recipe = get_recipe("tensorwise")
    weight, grad_output = (dataclasses.replace(recipe.weight, format=fmt) for fmt in ("e5m2", "e4m3"))
    return dataclasses.replace(recipe, weight=weight, grad_output=grad_output)


def larger():
    layer = built("blockwise", shape=(41, 24))
    with torch.no_grad():
        layer.weight.mul_(3.0)
    return layer


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: {k: v for k, v in built().state_dict().items() if k != "weight_scale_e4m3"}, "Missing key"),
        (lambda: built(e5m2()).state_dict(), "Missing key"),
        (lambda: built("rowwise").state_dict(), "size mismatch"),
        (lambda: larger().state_dict(), "size mismatch"),
    ],
    ids=["no scales", "format", "granularity", "shape"],
)
@pytest.mark.parametrize("strict", [True, False])
def test_what_does_not_fit_is_told_by_torch_and_is_never_computed_with(make, told, strict):
    layer = built("blockwise" if told == "size mismatch" else "tensorwise")
    state = make()
    if strict or told == "size mismatch":
        with pytest.raises(RuntimeError, match=told):
            layer.load_state_dict(state, strict=strict)
    else:
        layer.load_state_dict(state, strict=False)
    with pytest.raises(Fp8Error, match=r"without the (scales|codes)"):
        layer(torch.ones(2, 24))
    layer.load_state_dict(built(layer.config.recipe).state_dict())
    layer(torch.ones(2, 24))


def test_pickling_a_module_keeps_codes_and_leaves_copies_behind():
    layer = built(shape=(256, 256))
    assert layer.weight.get_high_precision_init_val().nbytes == 4 * 256 * 256
    file = io.BytesIO()
    torch.save(layer, file)
    assert file.tell() < 256 * 256 + 16000
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert torch.equal(loaded.weight.dequantize(), layer.weight.dequantize())
    x = torch.randn(4, 256)
    assert torch.equal(loaded(x), layer(x))
