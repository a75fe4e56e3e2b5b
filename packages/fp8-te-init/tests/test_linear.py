"""Layers with FP8 primary weights: how they are made, what they compute, what state dicts and pickles hold of them."""

import dataclasses
import io
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import fp8_te_init as fti
from fp8_common import CANONICAL, CastRecipe, Fp8Error, Recipe
from fp8_common.numerics import update_history
from fp8_common.recipe import get_recipe
from fp8_common.torch import amax, amax_to_scale, quantize, quantize_blockwise, quantize_rowwise
from tests.helpers.primary_models import built, loss_of, masters_for, step

RECIPES = ["tensorwise", "tensorwise_delayed", "rowwise", "rowwise_with_gw_hp", "blockwise"]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def linear(dtype=torch.float32, shape=(40, 24)) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(shape[1], shape[0], dtype=dtype)


def primary(recipe="tensorwise", dtype=torch.float32, shape=(40, 24), **options) -> nn.Linear:
    with fti.fp8_model_init(recipe=recipe, preserve_high_precision_init_val=True, **options):
        return linear(dtype, shape)


def assert_same_weight(ours, theirs):
    assert torch.equal(ours.weight.codes.view(torch.uint8), theirs.weight.codes.view(torch.uint8))
    assert torch.equal(ours.weight.scale, theirs.weight.scale)
    assert torch.equal(ours.bias, theirs.bias)


def reference_codes(weight, recipe):
    """Codes and scales by the public functions of fp8_common."""
    if recipe.startswith("rowwise"):
        policy = fti.LinearConfig(recipe=get_recipe(recipe)).weight.policy
        return quantize_rowwise(weight, "e4m3", -1, policy)
    if recipe == "blockwise":
        return quantize_blockwise(weight, "e4m3", (128, 128))
    scale = amax_to_scale(amax(weight), "e4m3")
    return quantize(weight, scale, "e4m3"), scale


# ---------------------------------------------------------------- how they are made


@pytest.mark.matrix(recipe=RECIPES, dtype=DTYPES, shape=[(40, 24), (130, 129), (1, 16), (7, 1)])
def test_the_copy_is_the_value_before_rounding_and_gives_the_codes(recipe, dtype, shape):
    layer, twin = primary(recipe, dtype, shape), linear(dtype, shape)
    start = layer.weight.get_high_precision_init_val()
    assert layer.weight.dtype == start.dtype == dtype
    assert torch.equal(start, twin.weight)
    codes, scale = reference_codes(twin.weight.detach(), recipe)
    assert torch.equal(layer.weight.codes.view(torch.uint8), codes.view(torch.uint8))
    assert torch.equal(layer.weight.scale, scale)
    assert_same_weight(fti.convert_linear(twin, recipe=recipe), layer)
    with torch.device("meta"):
        deferred = primary(recipe, dtype, shape)
    assert deferred.weight.is_meta
    assert deferred.weight.codes.is_meta
    deferred.to_empty(device="cpu")
    torch.manual_seed(0)
    deferred.reset_parameters()
    assert_same_weight(deferred, layer)
    assert torch.equal(deferred.weight.get_high_precision_init_val(), start)


def test_blocks_nest_are_switched_off_and_end_with_an_exception():
    hooks = list(nn.modules.module._global_parameter_registration_hooks)  # deferred layers of other tests leave one
    with fti.fp8_model_init():
        with fti.fp8_model_init(recipe="blockwise", preserve_high_precision_init_val=True):
            inner = nn.Linear(8, 8)
        with fti.fp8_model_init(enabled=False):
            off = nn.Linear(8, 8)
        with pytest.raises(ZeroDivisionError), fti.fp8_model_init(recipe="rowwise"):
            nn.Linear(8, 1 // 0)
        outer = nn.Linear(8, 8)
    after = nn.Linear(8, 8)
    assert inner.config.weight.granularity == "blockwise_128x128"
    assert inner.weight.get_high_precision_init_val().shape == (8, 8)
    assert outer.config.weight.granularity == "tensorwise"
    assert outer.weight.get_high_precision_init_val() is None
    assert type(off) is type(after) is nn.Linear
    assert type(off.weight) is nn.Parameter
    assert list(nn.modules.module._global_parameter_registration_hooks) == hooks


def test_a_layer_that_another_thread_builds_is_a_plain_one():
    with fti.fp8_model_init(), ThreadPoolExecutor(1) as pool:
        assert type(pool.submit(nn.Linear, 8, 8).result()) is nn.Linear


def test_models_are_built_in_a_thread_while_others_step():
    """No hook of the process comes or goes while torch walks over them."""

    def build():
        for seed in range(10):
            net = built(seed=seed)
            step(net, masters_for(net))

    stranger = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(stranger.parameters(), lr=0.1)
    with ThreadPoolExecutor(2) as pool:
        building = [pool.submit(build) for _ in range(2)]
        while not all(one.done() for one in building):
            stranger(torch.ones(1, 8)).sum().backward()
            optimizer.step()
            nn.Linear(4, 4)
        assert [one.exception() for one in building] == [None, None]


def test_only_plain_linear_layers_are_taken():
    class Own(nn.Linear):
        def forward(self, x):
            return super().forward(x) * 2

    with fti.fp8_model_init():
        own, attention = Own(8, 8), nn.MultiheadAttention(8, 2)
    assert type(own) is Own
    assert type(own.weight) is nn.Parameter
    attention(*[torch.randn(3, 1, 8)] * 3)


def test_filters_and_rules_choose_layers_and_their_recipes(caplog):
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    with caplog.at_level("INFO"):
        fti.convert_linear(model, module_filter_fn=lambda module, name: name == "1")
    assert [type(layer) for layer in model] == [nn.Linear, fti.PrimaryFloat8Linear]
    assert "1 linear layers have FP8 primary weights. Left in high precision: 0 (filtered)." in caplog.text
    model = nn.ModuleDict({"a": nn.Linear(8, 8), "b": nn.Linear(8, 8), "head": nn.Linear(8, 8)})
    recipe = get_recipe("tensorwise").to_dict()
    fti.convert_linear(model, recipe=recipe, module_filter_fn=["*", "b = rowwise", "!head"])
    assert [model[name].config.recipe.name for name in "ab"] == ["tensorwise", "rowwise"]
    assert type(model["head"]) is nn.Linear


def convert(**options):
    return fti.convert_linear(nn.Linear(4, 4), **options)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: fti.convert_linear(nn.ReLU()), "No nn.Linear layer to convert"),
        (lambda: convert(release="never"), "release must be one of 'seed'"),
        (lambda: convert(recipe="fp4"), "Unknown recipe 'fp4'"),
        (lambda: fti.convert_linear(nn.Linear(4, 4).double()), "is torch.float64: FP8 codes are made of"),
        (lambda: convert(recipe="mxfp8"), "MX weights need TransformerEngine"),
        (
            lambda: convert(recipe=Recipe(name="off", weight=CastRecipe(scaling="static", static_scale=2.0))),
            "is dynamic or delayed, not static",
        ),
        (lambda: fti.fp8_model_init(backend="gpu").__enter__(), "backend must be one of 'auto'"),
        (lambda: convert(recipe="rowwise", config=fti.LinearConfig()), "Pass recipe or config, not both"),
        (lambda: primary()(torch.randn(3, 7)), r"expects \[..., 24\] as input, got \(3, 7\)"),
    ],
)
def test_bad_choices_say_what_they_got_and_what_to_do(call, message):
    with pytest.raises(Fp8Error, match=message):
        call()


def test_a_conversion_that_raises_leaves_the_model_unchanged():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8).double())
    with pytest.raises(Fp8Error, match=r"1\.weight is torch.float64"):
        fti.convert_linear(model)
    assert [type(layer) for layer in model] == [nn.Linear, nn.Linear]
    assert type(model[0].weight) is nn.Parameter


# ---------------------------------------------------------------- what they compute


def test_reading_gives_dequantized_values_and_new_tensors_are_plain():
    weight = primary().weight.detach()
    values = weight.dequantize()
    for read in (weight.float(), weight + 0, weight.t().t() + 0, weight[2:5].clone(), weight.reshape(-1).clone()):
        assert type(read) is torch.Tensor or read.dequantize().equal(values.reshape(read.shape))
    assert type(torch.zeros_like(weight)) is type(weight.double()) is torch.Tensor
    assert torch.equal(weight.double(), values.double())
    assert torch.equal(weight[2:5] + 0, values[2:5])
    assert torch.equal(weight.t() + 0, values.t())
    low = primary(dtype=torch.bfloat16).weight
    assert torch.equal(low.dequantize(dtype=torch.float32), low.state.values())
    assert low.dequantize().dtype == torch.bfloat16


def test_a_view_in_another_dtype_is_one_of_the_values():
    layer = primary()
    values = layer.weight.dequantize()
    for dtype in (torch.int32, torch.int16, torch.uint8, torch.bfloat16):
        view = layer.weight.detach().view(dtype)
        assert type(view) is torch.Tensor
        assert torch.equal(view.view(torch.uint8), values.view(torch.uint8))


@pytest.mark.matrix(recipe=RECIPES, device=["cpu", "meta"], shape=[(40, 24), (0, 24), (40, 0)])
def test_inputs_and_layers_without_rows_features_or_data_have_the_right_shape(recipe, device, shape):
    rows, columns = shape
    with torch.device(device):
        layer = primary(recipe, shape=shape)
    assert layer(torch.ones(3, columns, device=device)).shape == (3, rows)
    assert layer(torch.ones(columns, device=device)).shape == (rows,)
    empty = layer(torch.ones(0, columns, device=device))
    empty.sum().backward()
    assert empty.shape == (0, rows)
    assert layer.weight.grad.shape == shape
    if device == "cpu":
        assert layer.weight.grad.count_nonzero() == 0
        layer(torch.ones(3, columns)).sum().backward()
        masters_for(layer, seed=False).step()


def test_gradients_accumulate_and_recomputed_ones_are_the_same():
    net, x = built(), torch.ones(4, 24, requires_grad=True)
    net(x).sum().backward()
    once = net[0].weight.grad.clone()
    net(x).sum().backward()
    assert torch.equal(net[0].weight.grad, 2 * once)
    net.zero_grad()
    checkpoint(net, x, use_reentrant=False).sum().backward()
    assert torch.equal(net[0].weight.grad, once)


def test_compiled_models_compute_with_the_codes_of_now_and_read_dtype_and_device():
    """As models of Transformers do; a guard of the compiler compared what every step changes, and failed at once."""
    net, traced = built(), []
    optimizer, weight = masters_for(net, lr=0.5), net[0].weight
    compiled = torch.compile(net, backend="aot_eager")
    cast = torch.compile(
        lambda x: x.to(weight.dtype).to(weight.device) + 1, fullgraph=True, backend=lambda g, _: traced.append(g) or g
    )
    for _ in range(3):
        assert torch.equal(loss_of(compiled), loss_of(net))
        assert cast(torch.ones(2)).dtype == torch.float32
        step(net, optimizer)
    assert len(traced) == 1, "steps are no reason to compile again"


@pytest.mark.parametrize("algo", ["max", "most_recent"])
@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
def test_histories_are_those_of_the_definition(algo, bad):
    policy = dataclasses.replace(CANONICAL, history=3, algo=algo)
    state = primary(Recipe(name="delayed weight", weight=CastRecipe(scaling="delayed", policy=policy))).weight.state
    wanted = torch.zeros(3).numpy()
    state.history.zero_()
    for newest in (1.0, 2.0, 3.0, bad, 4.0):
        values = torch.full((40, 24), newest)
        used = state.history.amax() if algo == "max" else state.history[0].clone()
        before = state.scale.clone()
        state.quantize_(values, state.amax_bits(values), record="step")
        wanted, _ = update_history(wanted, torch.tensor(newest).numpy(), algo)
        assert state.history.tolist() == wanted.tolist()
        assert state.scale == (before if used == 0 else torch.div(torch.tensor(448.0), used))


# ---------------------------------------------------------------- state dicts and pickles


@pytest.mark.matrix(recipe=RECIPES, assign=[False, True], inference=[False, True])
def test_state_dicts_hold_plain_codes_and_scales_and_come_back_bit_for_bit(recipe, assign, inference, tmp_path):
    layer, other = (primary(recipe, shape=(130, 129)) for _ in range(2))
    with torch.no_grad():
        layer.weight.mul_(3.0)
    layer.weight.state.quantize_(layer.weight.dequantize(), None, record="step")  # a history of two
    with torch.inference_mode(inference):
        torch.save(layer.state_dict(), tmp_path / "file")
        state = torch.load(tmp_path / "file", weights_only=True)
        other.load_state_dict(state, assign=assign)
    assert (tmp_path / "file").stat().st_size < 130 * 129 + 8000, "a byte for each element, no copy of the start"
    assert state["weight"].dtype == torch.uint8
    assert state["weight_scale_e4m3"].dtype == torch.float32
    assert isinstance(other.weight, fti.PrimaryFloat8Weight)
    assert_same_weight(other, layer)
    assert torch.equal(other.weight.dequantize(), layer.weight.dequantize())
    if recipe == "tensorwise_delayed":
        assert torch.equal(other.weight.state.history, layer.weight.state.history)


def e5m2():
    recipe = get_recipe("tensorwise")
    weight, grad_output = (dataclasses.replace(recipe.weight, format=fmt) for fmt in ("e5m2", "e4m3"))
    return dataclasses.replace(recipe, weight=weight, grad_output=grad_output)


def larger():
    layer = primary("blockwise", shape=(41, 24))
    with torch.no_grad():
        layer.weight.mul_(3.0)
    return layer


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: {k: v for k, v in primary().state_dict().items() if k != "weight_scale_e4m3"}, "Missing key"),
        (lambda: primary(e5m2()).state_dict(), "Missing key"),
        (lambda: primary("rowwise").state_dict(), "size mismatch"),
        (lambda: larger().state_dict(), "size mismatch"),
    ],
    ids=["no scales", "format", "granularity", "shape"],
)
@pytest.mark.parametrize("strict", [True, False])
def test_what_does_not_fit_is_told_by_torch_and_is_never_computed_with(make, told, strict):
    layer = primary("blockwise" if told == "size mismatch" else "tensorwise")
    if strict or told == "size mismatch":
        with pytest.raises(RuntimeError, match=told):
            layer.load_state_dict(make(), strict=strict)
    else:
        layer.load_state_dict(make(), strict=False)
    with pytest.raises(Fp8Error, match=r"without the (scales|codes)"):
        layer(torch.ones(2, 24))
    layer.load_state_dict(primary(layer.config.recipe).state_dict())
    layer(torch.ones(2, 24))


@pytest.mark.parametrize("part", [lambda layer: layer, lambda layer: layer.weight], ids=["layer", "weight"])
def test_pickles_hold_codes_and_leave_copies_behind_and_seeding_says_so(part):
    layer, file = primary(shape=(256, 256)), io.BytesIO()
    assert layer.weight.get_high_precision_init_val().nbytes == 4 * 256 * 256
    torch.save(part(layer), file)
    assert file.tell() < 256 * 256 + 16000
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    weight = loaded.weight if isinstance(loaded, nn.Module) else loaded
    assert torch.equal(weight.dequantize(), layer.weight.dequantize())
    if isinstance(loaded, nn.Module):
        assert torch.equal(loaded(torch.ones(4, 256)), layer(torch.ones(4, 256)))
        with pytest.raises(fti.MissingInitError, match="values before rounding of weight are not known"):
            masters_for(loaded)


def test_parameters_are_rebuilt_as_accelerate_does_it():
    """`init_empty_weights`: type(p)(p.to(device), **p.__dict__, requires_grad=...)."""
    weight = primary().weight
    rebuilt = type(weight)(weight.to("meta"), **weight.__dict__ | {"requires_grad": weight.requires_grad})
    assert isinstance(rebuilt, fti.PrimaryFloat8Weight)
    assert isinstance(rebuilt, nn.Parameter)
    assert rebuilt.is_meta
    assert rebuilt.requires_grad
