"""One process: what a converted layer computes, keeps and refuses."""

import copy

import pytest
import torch
from torch import nn

import fp8_torch_fsdp as f8
from fp8_common import E4M3, E5M2, Fp8Error, Fp8UnsupportedError
from fp8_common import torch as f8t
from fp8_common.torch.linear.matmul import MatmulOptions, matmul
from fp8_common.torch.linear.operand import quantize_operand


def sqnr(reference: torch.Tensor, value: torch.Tensor) -> float:
    reference, value = reference.detach().double(), value.detach().double()
    return float(20 * torch.log10(reference.norm() / (reference - value).norm()))


def layer(dtype=torch.float32, all_gather=True, **options):
    torch.manual_seed(0)
    config = f8.Float8LinearConfig(all_gather=all_gather, **options)
    return f8.convert_to_float8_training(nn.Linear(256, 192).to(dtype), config=config)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("all_gather", [True, False])
def test_output_and_gradients_are_close_to_high_precision(dtype, all_gather):
    low = layer(dtype, all_gather)
    high = nn.Linear(256, 192)
    high.load_state_dict({name: value.float() for name, value in low.state_dict().items()})
    x = torch.randn(4, 32, 256).to(dtype).requires_grad_()
    x_high = x.detach().float().requires_grad_()
    upstream = torch.randn(4, 32, 192).to(dtype)
    y, y_high = low(x), high(x_high)
    y.backward(upstream)
    y_high.backward(upstream.float())
    assert y.dtype == x.grad.dtype == low.weight.grad.dtype == low.bias.grad.dtype == dtype
    # measured 28.6, 24.9, 24.7 dB in all three dtypes; e5m2 gradients have two mantissa bits
    assert sqnr(y_high, y) > 28
    assert sqnr(x_high.grad, x.grad) > 24
    assert sqnr(high.weight.grad, low.weight.grad) > 24


def test_products_are_those_of_the_definition():
    """Output and gradients equal the formulas on dequantized operands, up to the order of accumulation."""
    low = layer(all_gather=False)
    x = torch.randn(64, 256, requires_grad=True)
    upstream = torch.randn(64, 192)
    y = low(x)
    y.backward(upstream)

    def rounded(t, fmt):
        scale = f8t.amax_to_scale(f8t.amax(t), fmt)
        return f8t.dequantize(f8t.quantize(t, scale, fmt), scale, fmt).double()

    xq, wq, gq = rounded(x.detach(), E4M3), rounded(low.weight.detach(), E4M3), rounded(upstream, E5M2)
    torch.testing.assert_close(y.double(), xq @ wq.t() + low.bias.double(), rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(x.grad.double(), gq @ wq, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(low.weight.grad.double(), gq.t() @ xq, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("rowwise", [False, True])
def test_emulated_products_agree_with_the_scaled_product(rowwise):
    """`scaled_mm` of a CPU multiplies the same operands."""
    if rowwise and torch.__version__ < "2.13":
        pytest.skip("torch takes row scales on CPU from torch 2.13 on")
    cast = f8.CastConfig(granularity="rowwise" if rowwise else "tensorwise")
    a, b = quantize_operand(torch.randn(48, 64), cast), quantize_operand(torch.randn(32, 64), cast)
    emulated = matmul(a, b, MatmulOptions(torch.float32, emulate=True))
    native = matmul(a, b, MatmulOptions(torch.float32, emulate=False))
    torch.testing.assert_close(emulated, native, rtol=1e-5, atol=1e-5)


def test_power_of_2_scales_reach_the_weight():
    from fp8_common import POWER_OF_2

    low = layer(recipe=f8.Recipe(name="custom", weight=f8.CastConfig(policy=POWER_OF_2)))
    scale = low.weight.info.cast.grid.scales(torch.tensor(0.3).view(torch.int32).view(1), torch.Size((1, 1)))
    assert scale == 2.0 ** torch.floor(torch.log2(torch.tensor(448 / 0.3)))


def test_nan_reaches_output_and_gradients():
    low = layer()
    x = torch.randn(8, 256)
    x[3, 5] = torch.nan
    y = low(x)
    assert torch.isnan(y[3]).all()
    assert torch.isfinite(y[4]).all()


def test_empty_batch():
    low = layer()
    x = torch.randn(0, 256, requires_grad=True)
    y = low(x)
    y.sum().backward()
    assert y.shape == (0, 192)
    assert not low.weight.grad.any()


def test_autocast_computes_in_its_dtype():
    with torch.autocast("cpu", torch.bfloat16):
        assert layer()(torch.randn(4, 256)).dtype == torch.bfloat16


def test_frozen_weight_and_first_layer_get_no_gradient():
    low = layer()
    low.weight.requires_grad_(False)
    x = torch.randn(4, 256, requires_grad=True)
    low(x).sum().backward()
    assert low.weight.grad is None
    assert x.grad is not None


def test_state_dict_is_plain_and_loads_without_this_package(tmp_path):
    low = layer()
    state = low.state_dict()
    assert {type(value) for value in state.values()} == {torch.Tensor}
    torch.save(state, tmp_path / "weights.pt")
    loaded = torch.load(tmp_path / "weights.pt", weights_only=True)
    plain = nn.Linear(256, 192)
    plain.load_state_dict(loaded)
    assert torch.equal(plain.weight, low.weight.plain)
    other = layer()
    other.load_state_dict(plain.state_dict(), assign=True)
    assert isinstance(other.weight, f8.ShardedFloat8Weight)


def test_pickling_a_model_says_what_to_save(tmp_path):
    with pytest.raises(Fp8Error, match=r"state_dict\(\)"):
        torch.save(layer(), tmp_path / "model.pt")


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_a_second_derivative_is_an_error(recipe):
    """Casts have no derivative of their own: without the error it would silently lack parts."""
    low = f8.convert_to_float8_training(nn.Linear(16, 8), recipe=recipe)
    x = torch.randn(4, 16, requires_grad=True)
    (grad,) = torch.autograd.grad(low(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.square().sum().backward()


def test_what_there_is_nothing_to_convert_of_is_named():
    with pytest.raises(Fp8Error, match=r"0 has no weight yet: run the model once"):
        f8.convert_to_float8_training(nn.Sequential(nn.LazyLinear(8)))
    done = f8.convert_to_float8_training(nn.Sequential(nn.Linear(8, 8)))
    with pytest.raises(Fp8Error, match="1 are FP8 layers already"):
        f8.convert_to_float8_training(done)


def test_deepcopy_is_independent():
    low = layer()
    twin = copy.deepcopy(low)
    with torch.no_grad():
        twin.weight.zero_()
    assert isinstance(twin.weight, f8.ShardedFloat8Weight)
    assert low.weight.plain.any()
    assert twin.weight.info is not low.weight.info


def test_layers_that_share_a_weight_still_share_it():
    a, b = nn.Linear(16, 16, bias=False), nn.Linear(16, 16, bias=False)
    b.weight = a.weight
    model = f8.convert_to_float8_training(nn.Sequential(a, b))
    assert model[0].weight is model[1].weight
    assert isinstance(model[0].weight, f8.ShardedFloat8Weight)


def test_a_weight_shared_with_an_embedding_stays_in_high_precision():
    embedding, head = nn.Embedding(32, 16), nn.Linear(16, 32, bias=False)
    head.weight = embedding.weight
    model = f8.convert_to_float8_training(nn.Sequential(embedding, nn.Linear(16, 16), head))
    assert model[2].weight is model[0].weight
    assert type(model[0].weight) is nn.Parameter
    assert isinstance(model[1].weight, f8.ShardedFloat8Weight)


def test_the_same_layer_in_two_places_is_converted_once():
    shared = nn.Linear(16, 16)
    model = f8.convert_to_float8_training(nn.ModuleDict({"a": shared, "b": nn.Sequential(shared)}))
    assert model["a"] is model["b"][0]
    assert isinstance(model["a"], f8.Float8Linear)


@pytest.mark.parametrize("replace", [f8.convert_to_float8_training, f8.unconvert])
def test_an_optimizer_that_was_made_too_early_does_not_step(replace):
    model = nn.Sequential(nn.Linear(32, 32))
    if replace is f8.unconvert:
        f8.convert_to_float8_training(model)
    early = torch.optim.SGD(model.parameters(), lr=1.0)
    replace(model)
    model(torch.ones(4, 32)).sum().backward()
    with pytest.raises(Fp8Error, match=rf"holds 1 of 2 .*{replace.__name__} replaced them.*Make the optimizer after"):
        early.step()
    torch.optim.SGD(model.parameters(), lr=1.0).step()


def test_a_replaced_weight_may_still_learn_in_another_model():
    kept = nn.Linear(32, 32)
    other = nn.Sequential(nn.Linear(32, 32))
    other[0].weight = kept.weight
    f8.convert_to_float8_training(other)
    before = kept.weight.detach().clone()
    kept(torch.ones(4, 32)).sum().backward()
    torch.optim.SGD(kept.parameters(), lr=1.0).step()
    assert not torch.equal(kept.weight, before)


def test_filter_chooses_by_layer_and_name():
    model = nn.ModuleDict({"body": nn.Linear(16, 16), "head": nn.Linear(16, 8)})
    f8.convert_to_float8_training(model, module_filter_fn=lambda module, name: name != "head")
    assert isinstance(model["body"], f8.Float8Linear)
    assert type(model["head"]) is nn.Linear


def test_hooks_and_training_mode_survive_conversion():
    calls = []
    linear = nn.Linear(16, 16).eval()
    linear.register_forward_hook(lambda *_: calls.append(1))
    converted = f8.convert_to_float8_training(linear)
    converted(torch.randn(2, 16))
    assert calls == [1]
    assert not converted.training


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: f8.convert_to_float8_training(nn.ReLU()), Fp8Error, "No nn.Linear"),
        (
            lambda: f8.convert_to_float8_training(nn.Linear(2, 2), recipe="nope"),
            Fp8Error,
            "Unknown recipe 'nope'",
        ),
        (
            lambda: f8.convert_to_float8_training(nn.Linear(2, 2), recipe="tensorwise", config=f8.Float8LinearConfig()),
            Fp8Error,
            "not both",
        ),
        (lambda: f8.Float8LinearConfig(emulate="yes"), Fp8Error, "emulate must be"),
        (lambda: f8.Float8LinearConfig(all_gather="step"), Fp8Error, "True or False"),
        (lambda: layer()(torch.randn(4, 255)), Fp8Error, r"\[..., 256\]"),
        (
            lambda: layer(emulate=False)(torch.randn(4, 256)),
            Fp8UnsupportedError,
            "cannot multiply|no FP8 matrix",
        ),
    ],
)
def test_errors_say_what_and_what_to_do(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_a_gathered_weight_acts_as_a_tensor_and_refuses_writes():
    codes = f8t.quantize(torch.randn(6, 4), torch.tensor(2.0), E4M3)
    weight = f8.GatheredWeight(codes, torch.tensor(2.0), "e4m3", torch.bfloat16)
    expected = f8t.dequantize(codes, torch.tensor(2.0), E4M3, torch.bfloat16)
    assert weight.dtype == torch.bfloat16
    assert torch.equal(weight + 0, expected)
    with pytest.warns(UserWarning, match="outside of its layer"):
        assert torch.equal(weight.t() @ torch.eye(6, dtype=torch.bfloat16), expected.t())
    with pytest.raises(RuntimeError, match="sharded parameter instead"):
        weight.mul_(2)


def test_a_layer_moves_to_another_device_and_back():
    """torch swaps each parameter with its copy, which it refuses while anything refers to one of them weakly."""
    moved, stayed = layer(), layer()
    x = torch.randn(8, 256)
    for _ in range(2):
        moved._apply(lambda t: torch.ops.aten._to_copy.default(t))  # what .to("cuda") does to each tensor
        assert isinstance(moved.weight, f8.ShardedFloat8Weight)
        assert torch.equal(moved(x), stayed(x))


def test_plugin_describes_itself():
    from fp8_common._machine import detect
    from fp8_torch_fsdp._plugin import describe

    info = describe(detect())
    assert (info.name, info.version) == ("fp8-torch-fsdp", f8.__version__)
    assert all(path.why for path in info.paths)


def test_clones_of_a_weight_are_saved_as_plain_tensors(tmp_path):
    low = layer()
    average = {"weight": low.weight.detach().clone() * 2, "copy": low.weight.clone().detach()}
    torch.save(average, tmp_path / "average.pt")
    loaded = torch.load(tmp_path / "average.pt", weights_only=True)
    assert {type(value) for value in loaded.values()} == {torch.Tensor}
    assert torch.equal(loaded["copy"], low.weight.plain)
    with pytest.raises(Fp8Error, match="cannot be pickled with their model"):
        torch.save(low, tmp_path / "model.pt")
