"""Quantizing and going back equal NumPy at every granularity, whatever the scale, although XLA flushes subnormals."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fp8_common
import fp8_common.jax as f8
from fp8_common import DATA_FORMATS, E8M0, POWER_OF_2, Fp8Error
from fp8_common.policy import MX_MODES
from fp8_common.testing import adversarial, all_codes, assert_same_bits

formats = pytest.mark.parametrize("fmt", DATA_FORMATS, ids=str)
SEED = 9
SCALES = np.float32([1, 2.0**100, 2.0**101, 2.0**127, 3.4e38, 2.0**-126, 1e-40, -1e-40, 2.0**-149, 0, np.inf, np.nan])


def subnormals(count):
    return np.random.default_rng(SEED).integers(-(2**31), -(2**31) + 2**23, count, np.int32).view(np.float32)


@formats
def test_any_scale_equals_numpy(fmt):
    """The domain has no hole: subnormal inputs with scales beyond 2^100, subnormal scales with huge inputs."""
    huge = np.random.default_rng(SEED).uniform(-3e38, 3e38, 2000).astype(np.float32)
    x = np.concatenate([adversarial(fmt), subnormals(2000), huge])
    rows = np.broadcast_to(x, (SCALES.size, x.size))
    got = jax.jit(lambda x, scale: f8.quantize(x, scale, fmt))(rows, SCALES[:, None])
    want = fp8_common.quantize(rows, SCALES[:, None], fmt)
    assert got.dtype == fmt.numpy_dtype
    assert_same_bits(got, want, fmt=fmt, source=rows, seed=SEED)


@formats
@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16, np.float16], ids=["float32", "bfloat16", "float16"])
def test_going_back_equals_numpy_down_to_subnormal_results(fmt, dtype):
    exponents = np.random.default_rng(SEED).uniform(-126, 128, 200)
    scale = np.concatenate([SCALES, np.exp2(exponents).astype(np.float32)])[:, None]
    codes = np.tile(all_codes(fmt), (scale.size, 1))
    got = jax.jit(lambda q, scale: f8.dequantize(q, scale, fmt, dtype))(codes, scale)
    assert_same_bits(got, fp8_common.dequantize(codes, scale, fmt, dtype), seed=SEED)


@formats
def test_there_and_back_in_one_graph_keeps_the_rounding(fmt):
    """A compiler must not take a conversion to eight bits and back for nothing."""
    x, scale = adversarial(fmt), np.float32(1)
    got = jax.jit(lambda x: f8.dequantize(f8.quantize(x, scale, fmt), scale, fmt))(x)
    assert_same_bits(got, fp8_common.decode(fp8_common.encode(x, fmt), fmt), source=x)


def test_constant_arguments_give_the_same_bits():
    x, scale = adversarial("e4m3"), np.float32(2.0**120)
    want = fp8_common.quantize(x, scale, "e4m3")
    assert_same_bits(jax.jit(lambda: f8.quantize(x, scale, "e4m3"))(), want, fmt="e4m3", source=x)
    back = fp8_common.dequantize(want, scale, "e4m3")
    assert_same_bits(jax.jit(lambda: f8.dequantize(want, scale, "e4m3"))(), back)


@formats
def test_rows_and_columns(fmt):
    x = np.random.default_rng(SEED).standard_normal((6, 40)).astype(np.float32)
    x[1], x[2, 3], x[3] = 0, np.nan, subnormals(40)
    for axis in (0, 1, -1):
        got = f8.quantize_rowwise(x, fmt, axis, POWER_OF_2)
        want = fp8_common.quantize_rowwise(x, fmt, axis, POWER_OF_2)
        assert_same_bits(got.data, want.data, fmt=fmt, source=x, seed=SEED)
        assert_same_bits(got.scale, want.scale)


@pytest.mark.parametrize("shape", [(130, 257), (2, 3, 129), (300,), (0, 4), (4, 0)], ids=str)
@pytest.mark.parametrize("block", [(1, 128), (128, 128), (1, 7)], ids=str)
def test_blocks(shape, block):
    if len(shape) == 1 and block[0] > 1:
        with pytest.raises(Fp8Error, match="cannot cut"):
            f8.quantize_blockwise(np.zeros(shape, np.float32), "e4m3", block)
        return
    x = np.random.default_rng(SEED).standard_normal(shape).astype(np.float32)
    got, want = f8.quantize_blockwise(x, "e4m3", block), fp8_common.quantize_blockwise(x, "e4m3", block)
    assert_same_bits(got.data, want.data, fmt="e4m3", source=x, seed=SEED)
    assert_same_bits(got.scale, want.scale)
    back = f8.dequantize_blockwise(*got, "e4m3", block)
    assert_same_bits(back, fp8_common.dequantize_blockwise(*want, "e4m3", block))


@formats
@pytest.mark.parametrize("mode", MX_MODES)
def test_mx_where_blocks_are_subnormal_or_largest(fmt, mode):
    rng = np.random.default_rng(SEED)
    x = rng.standard_normal((40, 70)).astype(np.float32)
    x[::4] = subnormals(70)
    x[1::4] *= np.float32(2.0**124)
    x[2::4] *= np.float32(2.0**-120)
    x[3, 0], x[7, 69], x[11, 40] = np.nan, np.inf, -0.0
    got, want = f8.quantize_mx(x, fmt, mode), fp8_common.quantize_mx(x, fmt, mode)
    assert got.scale.dtype == E8M0.numpy_dtype
    assert_same_bits(got.data, want.data, fmt=fmt, source=x, seed=SEED)
    assert_same_bits(got.scale, want.scale, fmt=E8M0)
    for scale in (got.scale, want.scale):
        assert_same_bits(f8.dequantize_mx(got.data, scale, fmt), fp8_common.dequantize_mx(*want, fmt))


def test_e8m0_scales_of_every_code():
    codes = all_codes(E8M0)
    assert_same_bits(f8.e8m0_to_scale(codes), fp8_common.e8m0_to_scale(codes))
    assert_same_bits(f8.e8m0_to_scale_inv(codes), fp8_common.e8m0_to_scale_inv(codes))


@pytest.mark.parametrize("algo", ["max", "most_recent"])
def test_history_rolls_and_ignores_what_is_not_finite(algo):
    window = np.float32([[1, 2.0**-149, 5], [7, 3, 1], [0, 0, 2]])
    for amax in np.float32([[4, np.nan, -6], [np.inf, 2.0**-140, 0]]):
        got, want = f8.update_history(window, amax, algo), fp8_common.update_history(window, amax, algo)
        assert_same_bits(got[0], want[0])
        assert_same_bits(got[1], want[1])
    with pytest.raises(Fp8Error, match="history must have shape"):
        f8.update_history(window, np.float32(1), algo)


def test_shapes_and_dtypes_that_do_not_fit_are_refused():
    x = np.zeros((2, 3), np.float32)
    with pytest.raises(Fp8Error, match=r"scale of shape \(2,\) does not broadcast to \(2, 3\)"):
        f8.quantize(x, np.ones(2, np.float32), "e4m3")
    with pytest.raises(Fp8Error, match=r"scale of shape \(1, 2, 3\) does not broadcast"):
        f8.quantize(x, np.ones((1, 2, 3), np.float32), "e4m3")
    with pytest.raises(Fp8Error, match="scale must be float16, bfloat16 or float32, got float64"):
        f8.quantize(x, 2.0, "e4m3")
    with pytest.raises(Fp8Error, match=r"must have shape \(2, 1\), got \(2, 3\)"):
        f8.dequantize_blockwise(np.zeros((2, 3), np.uint8), x, "e4m3")
    with pytest.raises(Fp8Error, match="dtype must be float16, bfloat16 or float32, got int32"):
        f8.dequantize(np.zeros(3, np.uint8), np.float32(1), "e4m3", np.int32)
    with pytest.raises(Fp8Error, match="mode must be one of"):
        f8.quantize_mx(x, "e4m3", "up")
