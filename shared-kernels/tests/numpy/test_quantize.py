"""Quantization at every granularity, against a loop over slices or blocks as tensors of their own."""

import ml_dtypes
import numpy as np
import pytest

from fp8_common import (
    CANONICAL,
    DATA_FORMATS,
    POWER_OF_2,
    Fp8Error,
    Quantized,
    amax,
    amax_to_e8m0,
    amax_to_scale,
    decode,
    dequantize,
    dequantize_blockwise,
    dequantize_mx,
    e8m0_to_scale,
    encode,
    get_format,
    quantize,
    quantize_blockwise,
    quantize_mx,
    quantize_rowwise,
    quantize_stochastic,
)
from fp8_common.policy import MX_MODES
from fp8_common.presets import deepgemm, torchao
from fp8_common.testing import adversarial, all_bfloat16, assert_same_bits

SEED = 17
formats = pytest.mark.parametrize("fmt", DATA_FORMATS, ids=str)
BLOCKS = [(1, 128), (128, 128), (1, 32), (3, 5), (1, 1)]
SHAPES = [(5, 300), (130, 140), (1, 1), (3, 128), (2, 3, 129), (0, 128), (4, 0), (257,)]


def data(shape, dtype=np.float32):
    """Numbers over many magnitudes, with a zero block and, if there is room, NaN and infinity."""
    rng = np.random.default_rng(SEED)
    x = rng.normal(size=shape) * np.exp2(rng.integers(-20, 20, shape))
    flat = x.reshape(-1)
    if flat.size > 200:
        flat[:140], flat[150], flat[-1] = 0, np.nan, np.inf
    with np.errstate(over="ignore"):
        return x.astype(dtype)


def tensorwise(x, fmt, policy):
    """Quantize a whole array with one scale."""
    scale = amax_to_scale(amax(x), fmt, policy)
    return quantize(x, scale, fmt), float(scale)


def block_slices(shape, block):
    """Yield (index of the scale, slices of the data) for each block of the last two dimensions."""
    rows, columns = (1, *shape)[-2], shape[-1]
    for lead in np.ndindex(*shape[:-2]):
        for i in range(-(-rows // block[0])):
            for j in range(-(-columns // block[1])):
                row = slice(i * block[0], (i + 1) * block[0])
                column = slice(j * block[1], (j + 1) * block[1])
                yield ((*lead, i, j), (*lead, row, column)) if len(shape) > 1 else ((j,), (column,))


@formats
def test_the_product_is_rounded_to_float32_before_the_cast(fmt):
    x, scale = adversarial(fmt, scale=0.7), np.float32(0.7)
    with np.errstate(invalid="ignore"):
        want = encode((x.astype(np.float64) * np.float64(scale)).astype(np.float32), fmt)
    assert_same_bits(quantize(x, scale, fmt), want, fmt=fmt, source=x)


def test_rounding_the_exact_product_once_would_differ_somewhere():
    x = np.random.default_rng(SEED).normal(size=2_000_000).astype(np.float32)
    scale = np.float32(1 / 3)
    once = encode(x.astype(np.float64) * np.float64(scale), "e4m3")
    assert (quantize(x, scale, "e4m3") != once).any()


@formats
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_sixteen_bit_inputs_equal_their_float32_values(fmt, dtype):
    x, scale = data((40, 30), dtype), np.float32(1.7)
    assert_same_bits(quantize(x, scale, fmt), quantize(x.astype(np.float32), scale, fmt), fmt=fmt, source=x)


def test_extreme_scales_and_special_inputs():
    x = np.float32([1, -1, 0, np.inf, np.nan, 1e-45])
    assert decode(quantize(x, np.float32(2.0**100), "e4m3"), "e4m3").tolist()[:3] == [448, -448, 0]
    assert decode(quantize(x, np.float32(2.0**-126), "e4m3"), "e4m3").tolist()[:3] == [0, 0, 0]
    assert np.isnan(decode(quantize(x, np.float32(2), "e4m3"), "e4m3")[3:5]).all()
    # what torchao's rule gives for an infinite amax: scale 0, and infinity times zero is NaN
    found = decode(quantize(x, np.float32(0), "e4m3"), "e4m3")
    assert found[:3].tolist() == [0, 0, 0]
    assert np.isnan(found[3:5]).all()


@formats
@pytest.mark.parametrize("scale", [-3.0, 2.0**-90, 0.7, 2.0**100, np.inf])
@pytest.mark.parametrize("cast", [quantize, lambda *args: quantize_stochastic(*args, np.zeros(4, np.uint32))])
def test_infinity_becomes_nan_and_a_product_that_overflows_saturates(fmt, scale, cast):
    x, scale, top = np.float32([np.inf, -np.inf, np.nan, 3e38]), np.float32(scale), np.float32(get_format(fmt).max)
    found = decode(cast(x, scale, fmt), fmt)
    assert np.isnan(found[:3]).all()
    assert found[3] == np.copysign(top, scale)


@formats
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("axis", [0, -1])
def test_rowwise_equals_a_loop(fmt, shape, axis):
    x = data(shape)
    found = quantize_rowwise(x, fmt, axis)
    assert found.data.shape == shape
    assert found.scale.shape == tuple(1 if i == axis % len(shape) else n for i, n in enumerate(shape))
    rows = np.moveaxis(x, axis, -1)
    codes, scales = np.moveaxis(found.data, axis, -1), np.moveaxis(found.scale, axis, -1)
    for index in np.ndindex(*rows.shape[:-1]):
        want, scale = tensorwise(rows[index], fmt, CANONICAL)
        assert_same_bits(codes[index], want, fmt=fmt, source=rows[index], seed=SEED)
        assert scales[index].item() == scale


@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
@pytest.mark.parametrize("policy", [POWER_OF_2, torchao(), deepgemm(ue8m0=True)], ids=lambda policy: policy.name)
def test_policies_reach_every_granularity(fmt, policy):
    x = np.nan_to_num(data((3, 260)), posinf=5)
    for found, parts in (
        (quantize_rowwise(x, fmt, policy=policy), [((i, 0), (i, slice(None))) for i in range(3)]),
        (quantize_blockwise(x, fmt, (2, 128), policy), list(block_slices(x.shape, (2, 128)))),
    ):
        for where, part in parts:
            want, scale = tensorwise(x[part], fmt, policy)
            assert_same_bits(found.data[part], want, fmt=fmt, source=x[part], seed=SEED)
            assert found.scale[where] == scale


@formats
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_blockwise_equals_a_loop(fmt, shape, block):
    if (len(shape) == 1 and block[0] > 1) or (block == (1, 1) and np.prod(shape) > 2000):
        block = (1, 64)
    x = data(shape)
    found = quantize_blockwise(x, fmt, block)
    lead, rows, columns = shape[:-2], shape[-2:-1], shape[-1]
    assert found.scale.shape == (*lead, *(-(-n // block[0]) for n in rows), -(-columns // block[1]))
    assert (found.data.dtype, found.scale.dtype) == (np.uint8, np.float32)
    for where, part in block_slices(shape, block):
        want, scale = tensorwise(x[part], fmt, CANONICAL)
        assert_same_bits(found.data[part], want, fmt=fmt, source=x[part], seed=SEED)
        assert found.scale[where] == scale


@formats
@pytest.mark.parametrize("mode", MX_MODES)
@pytest.mark.parametrize("shape", [(3, 70), (2, 2, 32), (33,), (0, 5), (2, 0)], ids=str)
def test_mx_equals_a_loop(fmt, mode, shape):
    x = data(shape)
    if x.size > 140:
        x.reshape(-1)[145] = 1e-44
    found = quantize_mx(x, fmt, mode)
    assert (found.data.dtype, found.scale.dtype) == (np.uint8, np.uint8)
    assert found.scale.shape == (*shape[:-1], -(-shape[-1] // 32))
    for where, part in block_slices(shape, (1, 32)):
        code = amax_to_e8m0(amax(x[part]), fmt, mode)
        assert found.scale[where] == code
        assert_same_bits(found.data[part], quantize(x[part], e8m0_to_scale(code), fmt), fmt=fmt, source=x[part])


def test_mx_rounds_its_scales_with_rceil_unless_told_otherwise():
    x = np.full((1, 32), 449, np.float32)
    assert quantize_mx(x, "e4m3").scale == quantize_mx(x, "e4m3", "rceil").scale == 128
    assert quantize_mx(x, "e4m3", "floor").scale == 127


def test_an_mx_block_with_infinity_or_nan_is_all_nan_and_its_neighbour_is_not():
    x = np.ones((2, 64), np.float32)
    x[0, 3], x[1, 40] = np.inf, np.nan
    found = quantize_mx(x, "e4m3")
    assert found.scale.tolist() == [[255, 119], [119, 255]]
    bad = np.isnan(decode(found.data, "e4m3"))
    assert bad.reshape(2, 2, 32).all(axis=-1).tolist() == [[True, False], [False, True]]
    assert bad.sum() == 64
    assert np.isnan(dequantize_mx(*found, "e4m3")).sum() == 64


@formats
@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_dequantize_multiplies_by_the_rounded_reciprocal(fmt, dtype):
    codes, scale = np.arange(256, dtype=np.uint8), np.float32(49)
    inverse = np.float32(1 / np.float64(scale))
    with np.errstate(over="ignore"):
        want = (decode(codes, fmt).astype(np.float64) * inverse).astype(np.float32).astype(dtype)
    found = dequantize(codes, scale, fmt, dtype)
    assert found.dtype == dtype
    assert_same_bits(found, want, source=codes)
    # dividing by the scale is another number
    with np.errstate(invalid="ignore"):
        assert (decode(codes, fmt) / scale != decode(codes, fmt) * inverse).mean() > 0.2


def test_dequantize_rounds_to_float32_before_a_narrower_type():
    codes = np.arange(0x30, 0x40, dtype=np.uint8)
    scale = np.random.default_rng(SEED).uniform(1, 2, (20_000, 1)).astype(np.float32)
    exact = decode(codes, "e4m3").astype(np.float64) * (1 / scale.astype(np.float64)).astype(np.float32)
    found = dequantize(codes, scale, "e4m3", np.float16)
    assert_same_bits(found, exact.astype(np.float32).astype(np.float16), seed=SEED)
    assert (found != exact.astype(np.float16)).any()


@formats
def test_blockwise_and_rowwise_come_back_block_by_block(fmt):
    x = np.nan_to_num(data((130, 260)), posinf=3)
    for block in ((1, 128), (128, 128)):
        found = quantize_blockwise(x, fmt, block)
        back = dequantize_blockwise(found.data, found.scale, fmt, block)
        for where, part in block_slices(x.shape, block):
            assert_same_bits(back[part], dequantize(found.data[part], found.scale[where], fmt))
        assert np.abs(back - x).max() <= np.abs(x).max() * 2.0 ** -(fmt.mantissa_bits + 1)
    found = quantize_rowwise(x, fmt)
    assert np.abs(dequantize(*found, fmt) - x).max() <= np.abs(x).max() * 2.0 ** -(fmt.mantissa_bits + 1)


@formats
@pytest.mark.parametrize("mode", MX_MODES)
def test_mx_comes_back_exactly_times_a_power_of_two(fmt, mode):
    x = np.nan_to_num(data((3, 70)), posinf=3)
    found = quantize_mx(x, fmt, mode)
    powers = np.ldexp(1.0, found.scale.astype(int) - 127)
    want = decode(found.data, fmt).astype(np.float64) * np.repeat(powers, 32, axis=1)[:, :70]
    assert_same_bits(dequantize_mx(*found, fmt), want.astype(np.float32))


@formats
def test_a_second_round_trip_changes_nothing(fmt):
    x = all_bfloat16().astype(np.float32).reshape(256, 256)
    x = np.where(np.isfinite(x), x, np.float32(1))
    scale = np.float32(2.0**10)
    once = quantize(x, scale, fmt)
    assert_same_bits(quantize(dequantize(once, scale, fmt), scale, fmt), once, fmt=fmt, source=x)


def test_results_unpack_and_broadcast():
    result = quantize_rowwise(np.float32([[1, 2], [3, 4]]), "e4m3", policy=POWER_OF_2)
    assert isinstance(result, Quantized)
    codes, scale = result
    assert dequantize(codes, scale, "e4m3").tolist() == [[1, 2], [3, 4]]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: quantize(np.zeros(2), np.float32(1), "e4m3"), "x must be float16, bfloat16 or float32, got float64"),
        (lambda: quantize(np.float32([1]), 2.0, "e4m3"), "scale must be float16, bfloat16 or float32, got float64"),
        (lambda: quantize(np.float32([1]), np.float32(1), "e8m0"), "E8M0 holds block scales"),
        (lambda: dequantize(np.int8([1]), np.float32(1), "e4m3"), "FP8 codes must be uint8 or float8_e4m3fn, got int8"),
        (lambda: dequantize(np.uint8([1]), np.float32(1), "e8m0"), "E8M0 holds block scales"),
        (
            lambda: quantize_blockwise(np.ones(4, np.float32), "e4m3", (2, 2)),
            r"Block \(2, 2\) cannot cut .* 1 dimension",
        ),
        (lambda: quantize_blockwise(np.ones((4, 4), np.float32), "e4m3", (0, 2)), "sides must be positive"),
        (lambda: quantize_mx(np.float32(1), "e4m3"), r"Block \(1, 32\) cannot cut a tensor of 0 dimension"),
        (lambda: dequantize_mx(np.uint8(1), np.uint8(1), "e4m3"), "cannot cut a tensor of 0 dimension"),
        (
            lambda: quantize_mx(np.ones((4, 4), np.float32), "e4m3", "up"),
            "mode must be one of floor, ceil, even, rceil",
        ),
        (
            lambda: dequantize_blockwise(np.zeros((4, 200), np.uint8), np.ones((4, 1), np.float32), "e4m3"),
            r"Scales for data of shape \(4, 200\) in blocks of \(1, 128\) must have shape \(4, 2\), got \(4, 1\)",
        ),
        (
            lambda: dequantize_mx(np.zeros((4, 64), np.uint8), np.zeros((4, 3), np.uint8), "e4m3"),
            r"must have shape \(4, 2\), got \(4, 3\)",
        ),
    ],
)
def test_bad_input_is_refused(call, message):
    with pytest.raises(Fp8Error, match=message):
        call()
