"""What the conformance table does not ask of JAX: names, constants, programs of GPUs, native codes, refusals."""

import dataclasses
import inspect
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import fp8_common
import fp8_common.jax as f8
from fp8_common import CANONICAL, E4M3, E5M2, Fp8Error, numerics
from fp8_common.formats import DATA_FORMATS, FORMATS
from fp8_common.jax._rounding import _converted
from fp8_common.jax.casts import cast
from fp8_common.presets import PRESETS
from fp8_common.testing import adversarial, all_bfloat16, all_codes, all_float16, assert_same_bits

formats = pytest.mark.parametrize("fmt", DATA_FORMATS, ids=str)
SEED = 5
NUMERICS = {f"fp8_common._reference.{name}" for name in ("quantize", "rounding", "scaling")}
SHARED = {name for name in numerics.__all__ if getattr(numerics, name).__module__ in NUMERICS}
SHARED -= {"Quantized", "philox", "random_bits"}


def test_every_numpy_function_exists_with_its_parameters_and_defaults():
    def parameters(module, name):
        found = inspect.signature(getattr(module, name)).parameters.values()
        return [(one.name, one.kind, None if one.name == "dtype" else one.default) for one in found]

    assert set(f8.__all__) == SHARED | {"Quantized", "fake_quantize"}
    assert f8.Quantized is numerics.Quantized
    for name in SHARED:
        assert parameters(f8, name) == parameters(numerics, name), name


def test_tests_run_with_strict_promotion_and_without_64_bits():
    assert jax.config.jax_numpy_dtype_promotion == "strict"
    assert not jax.config.jax_enable_x64


@formats
def test_there_and_back_in_one_graph_keeps_the_rounding(fmt):
    """A compiler must not take a conversion to eight bits and back for nothing."""
    x, scale = adversarial(fmt), np.float32(1)
    got = jax.jit(lambda x: f8.dequantize(f8.quantize(x, scale, fmt), scale, fmt))(x)
    assert_same_bits(got, fp8_common.numerics.decode(fp8_common.numerics.encode(x, fmt), fmt), source=x)


@formats
def test_the_nan_of_an_infinity_has_its_sign(fmt):
    x = np.float32([np.inf, -np.inf])
    np.testing.assert_array_equal(f8.encode(x, fmt), fp8_common.numerics.encode(x, fmt))
    codes = cast(jnp.asarray(x), jnp.float32(2), fmt)
    np.testing.assert_array_equal(np.asarray(codes).view(np.uint8), fp8_common.numerics.encode(x, fmt))


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=str)
def test_the_conversion_that_nvidia_gpus_have_gives_the_same_codes(fmt):
    """Run on a CPU, whose conversion rounds as theirs does; `test_kernels_on_gpu.py` compares the programs of a GPU."""
    any_bits = np.random.default_rng(SEED).integers(0, 2**32, 20_000, np.uint32).view(np.float32)
    with np.errstate(invalid="ignore"):
        x = np.concatenate([all_bfloat16().astype(np.float32), all_float16().astype(np.float32), any_bits])
    codes = jax.jit(partial(_converted, fmt))(jnp.asarray(x), ~np.isfinite(x))
    np.testing.assert_array_equal(np.asarray(codes).view(np.uint8), fp8_common.numerics.encode(x, fmt))


def test_programs_for_nvidia_gpus_hold_the_conversion_and_others_do_not():
    traced = jax.jit(lambda x: cast(x, jnp.float32(2), E4M3)).trace(jnp.ones((8, 8)))
    assert "f8E4M3FN>" in (on_gpu := traced.lower(lowering_platforms=("cuda",)).as_text())
    assert "stablehlo.clamp" in on_gpu
    assert "stablehlo.clamp" not in traced.lower(lowering_platforms=("cpu",)).as_text()


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=str)
def test_codes_may_be_of_the_native_dtype_and_a_copy_of_a_format_is_that_format(fmt):
    codes, copied = all_codes(fmt), dataclasses.replace(fmt)
    native = lax.bitcast_convert_type(jnp.asarray(codes), fmt.numpy_dtype)
    for given in (codes, native, codes.view(fmt.numpy_dtype)):
        assert_same_bits(f8.decode(given, copied), fp8_common.numerics.decode(codes, fmt))


@pytest.mark.parametrize("policy", [CANONICAL, PRESETS["te_current"](eps=1e-4)], ids=["canonical", "te_current"])
def test_constants_and_broadcasts_are_divided_too(policy):
    """XLA turns a division by a constant or by a broadcast into a product with the reciprocal, which rounds twice."""
    amax = np.random.default_rng(SEED).integers(0x3F800000, 0x40000000, 64, np.int32).view(np.float32)
    want = fp8_common.numerics.amax_to_scale_inv(amax, "e4m3", policy)
    assert_same_bits(jax.jit(lambda: f8.amax_to_scale_inv(amax, "e4m3", policy))(), want)
    spread = jax.jit(lambda a: f8.amax_to_scale_inv(jnp.broadcast_to(a, (64,)), "e4m3", policy))
    for one, other in zip(amax, want, strict=True):
        assert_same_bits(spread(one), np.broadcast_to(other, (64,)))


def test_constant_arguments_give_the_same_bits():
    x, scale = adversarial("e4m3"), np.float32(2.0**120)
    want = fp8_common.quantize(x, scale, "e4m3")
    assert_same_bits(jax.jit(lambda: f8.quantize(x, scale, "e4m3"))(), want, fmt="e4m3", source=x)
    back = fp8_common.dequantize(want, scale, "e4m3")
    assert_same_bits(jax.jit(lambda: f8.dequantize(want, scale, "e4m3"))(), back)


X = np.zeros((2, 3), np.float32)
# beside what every implementation refuses
REFUSED = [
    (lambda: f8.encode(np.float64(1), "e4m3"), "x must be float16, bfloat16 or float32, got float64"),
    (lambda: f8.encode([1.0], "e4m3"), "x must be float16, bfloat16 or float32, got"),
    (lambda: f8.encode_stochastic(X[0], "e4m3", np.int32([1, 2, 3])), r"must be uint32 of shape \(3,\), got int32"),
    (lambda: f8.amax_to_scale(X, "e4m3", CANONICAL, np.ones(2, np.float32)), r"prev of shape \(2,\) does not"),
    (lambda: f8.quantize(X, np.ones((1, 2, 3), np.float32), "e4m3"), r"scale of shape \(1, 2, 3\) does not broadcast"),
    (lambda: f8.quantize(X, 2.0, "e4m3"), "scale must be float16, bfloat16 or float32, got float64"),
    (
        lambda: f8.dequantize(np.zeros(3, np.uint8), X[0], "e4m3", np.int32),
        "dtype must be float16, bfloat16 or float32",
    ),
]


@pytest.mark.parametrize(("call", "message"), REFUSED)
def test_bad_input_raises(call, message):
    with pytest.raises(Fp8Error, match=message):
        call()
