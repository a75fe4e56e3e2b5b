"""The cast equals the oracle for every 16-bit float and around every midpoint, and saturates where XLA's does not."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import fp8_common
import fp8_common.jax as f8
from fp8_common import DATA_FORMATS, E4M3, E5M2, E8M0, FORMATS, Fp8Error
from fp8_common.jax._rounding import _converted
from fp8_common.jax.casts import cast
from fp8_common.testing import adversarial, all_bfloat16, all_codes, all_float16, assert_same_bits

formats = pytest.mark.parametrize("fmt", DATA_FORMATS, ids=str)
SEED = 5


def float32s(count=200_000):
    return np.random.default_rng(SEED).integers(0, 2**32, count, np.uint32).view(np.float32)


@formats
@pytest.mark.parametrize("x", [all_bfloat16(), all_float16(), float32s()], ids=lambda x: str(x.dtype))
def test_encode_equals_numpy(fmt, x):
    got, want = jax.jit(lambda x: f8.encode(x, fmt))(x), fp8_common.encode(x, fmt)
    assert_same_bits(got, want, fmt=fmt, source=x, seed=SEED)


@formats
def test_encode_equals_the_clipped_cast_of_xla(fmt):
    x = np.concatenate([adversarial(fmt), float32s()])
    x = x[np.isfinite(x)]

    @jax.jit
    def library(x):
        return lax.bitcast_convert_type(jnp.clip(x, -fmt.max, fmt.max).astype(fmt.numpy_dtype), jnp.uint8)

    assert_same_bits(f8.encode(x, fmt), library(x), fmt=fmt, source=x, seed=SEED)


@formats
def test_the_nan_of_an_infinity_has_its_sign(fmt):
    x = np.float32([np.inf, -np.inf])
    np.testing.assert_array_equal(f8.encode(x, fmt), fp8_common.encode(x, fmt))
    codes = cast(jnp.asarray(x), jnp.float32(2), fmt)
    np.testing.assert_array_equal(np.asarray(codes).view(np.uint8), fp8_common.encode(x, fmt))


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("x", [all_bfloat16(), all_float16(), float32s(20_000)], ids=lambda x: str(x.dtype))
def test_the_conversion_that_nvidia_gpus_have_gives_the_same_codes(x, fmt):
    """Run on a CPU, whose conversion rounds as theirs does; `test_kernels_on_gpu.py` compares the programs of a GPU."""
    x = x.astype(np.float32)
    codes = jax.jit(partial(_converted, fmt))(jnp.asarray(x), ~np.isfinite(x))
    np.testing.assert_array_equal(np.asarray(codes).view(np.uint8), fp8_common.encode(x, fmt))


def test_programs_for_nvidia_gpus_hold_the_conversion_and_others_do_not():
    traced = jax.jit(lambda x: cast(x, jnp.float32(2), E4M3)).trace(jnp.ones((8, 8)))
    assert "f8E4M3FN>" in (on_gpu := traced.lower(lowering_platforms=("cuda",)).as_text())
    assert "stablehlo.clamp" in on_gpu
    assert "stablehlo.clamp" not in traced.lower(lowering_platforms=("cpu",)).as_text()


@formats
def test_overflow_saturates_and_nan_stays(fmt):
    x = np.float32([3e38, -3e38, np.nextafter(np.float32(fmt.max), np.float32(np.inf))])
    assert f8.decode(f8.encode(x, fmt), fmt).tolist() == [fmt.max, -fmt.max, fmt.max]
    assert np.isnan(f8.decode(f8.encode(np.float32([np.nan, -np.nan, np.inf, -np.inf]), fmt), fmt)).all()


@formats
def test_negative_zero(fmt):
    assert int(f8.encode(np.float32(-0.0), fmt)) == (0 if fmt.fnuz else 0x80)
    assert int(f8.encode(np.float32(-(2.0**-140)), fmt)) == (0 if fmt.fnuz else 0x80)


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=str)
def test_decode_every_code_from_codes_and_from_the_native_dtype(fmt):
    codes = all_codes(fmt)
    native = lax.bitcast_convert_type(jnp.asarray(codes), fmt.numpy_dtype)
    for given in (codes, native, codes.view(fmt.numpy_dtype)):
        assert_same_bits(f8.decode(given, fmt), fp8_common.decode(codes, fmt))


@formats
def test_codes_survive_a_round_trip(fmt):
    codes = all_codes(fmt, finite=True)
    assert_same_bits(jax.jit(lambda q: f8.encode(f8.decode(q, fmt), fmt))(codes), codes, fmt=fmt)


@formats
def test_stochastic_equals_numpy(fmt):
    x = np.concatenate([adversarial(fmt), float32s()])
    bits = np.random.default_rng(SEED).integers(0, 2**32, x.size, np.uint32)
    for chosen in (bits, np.zeros_like(bits), np.full_like(bits, 2**32 - 1)):
        want = fp8_common.encode_stochastic(x, fmt, chosen)
        assert_same_bits(f8.encode_stochastic(x, fmt, chosen), want, fmt=fmt, source=x, seed=SEED)


@formats
def test_stochastic_never_moves_representable_values_and_is_unbiased(fmt):
    key = jax.random.key(SEED)
    codes = all_codes(fmt, finite=True)
    bits = jax.random.bits(key, codes.shape)
    assert_same_bits(f8.encode_stochastic(f8.decode(codes, fmt), fmt, bits), codes, fmt=fmt)

    count, step = 2**16, fmt.smallest_subnormal
    x = jnp.full(count, 0.3 * step, jnp.float32)
    mean = float(f8.decode(f8.encode_stochastic(x, fmt, jax.random.bits(key, x.shape)), fmt).mean()) / step
    assert abs(mean - 0.3) < 5 * np.sqrt(0.3 * 0.7 / count)


@pytest.mark.parametrize("bad", [np.float64(1), 1.0, [1.0], np.int32(1)], ids=lambda x: type(x).__name__)
def test_other_dtypes_are_refused(bad):
    with pytest.raises(Fp8Error, match="x must be float16, bfloat16 or float32, got"):
        f8.encode(bad, "e4m3")


def test_errors_say_what_to_do():
    x = np.float32([1, 2])
    with pytest.raises(Fp8Error, match="E8M0 holds block scales"):
        f8.encode(x, E8M0)
    with pytest.raises(Fp8Error, match="FP8 codes must be uint8 or float8_e4m3fn, got int8"):
        f8.decode(np.int8([1]), "e4m3")
    with pytest.raises(Fp8Error, match=r"random_bits must be uint32 of shape \(2,\), got int32"):
        f8.encode_stochastic(x, "e4m3", np.int32([1, 2]))
    with pytest.raises(Fp8Error, match=r"got uint32 of shape \(3,\)"):
        f8.encode_stochastic(x, "e4m3", np.zeros(3, np.uint32))


def test_a_copy_of_a_format_is_that_format():
    copied = dataclasses.replace(E8M0)
    codes = np.arange(256, dtype=np.uint8)
    assert_same_bits(np.asarray(f8.decode(codes, copied)), fp8_common.decode(codes, E8M0))
    with pytest.raises(Fp8Error, match="block scales"):
        f8.encode(np.float32([1]), copied)
