"""Quantization at every granularity, against a loop over slices or blocks as tensors of their own."""

import ml_dtypes
import numpy as np
import pytest

import fp8_common as f8
from fp8_common.policy import MX_MODES
from fp8_common.presets import mx, te_current
from fp8_common.testing import assert_same_bits, midpoints

SEED = 17
formats = pytest.mark.parametrize("fmt", f8.formats.DATA_FORMATS, ids=str)
DTYPES = [np.float32, np.float16, ml_dtypes.bfloat16]
BLOCKS = [(1, 128), (128, 128), (1, 32), (3, 50), (1, 64)]


def data(shape, dtype):
    """Numbers over many magnitudes, with a zero block and, if there is room, NaN, infinity and a subnormal."""
    rng = np.random.default_rng(SEED)
    x = rng.normal(size=shape) * np.exp2(rng.integers(-20, 20, shape))
    flat = x.reshape(-1)
    if flat.size > 200:
        flat[:140], flat[145], flat[150], flat[-1] = 0, 1e-44, np.nan, np.inf
    with np.errstate(over="ignore"):
        return x.astype(dtype)


def by_rows(axis):
    """Return a cast, its way back, and a function that gives (place of the scale, place of the data) of each row."""

    def parts(shape):
        axis_ = axis % len(shape)
        for index in np.ndindex(*(1 if i == axis_ else n for i, n in enumerate(shape))):
            yield index, tuple(slice(None) if i == axis_ else at for i, at in enumerate(index))

    def back(q, fmt, dtype):
        return f8.dequantize(*q, fmt, dtype)

    return lambda x, fmt, policy: f8.quantize_rowwise(x, fmt, axis, policy), back, parts


def block_parts(shape, block):
    for lead in np.ndindex(*shape[:-2]):
        for i in range(-(-(1, *shape)[-2] // block[0])):
            for j in range(-(-shape[-1] // block[1])):
                row = slice(i * block[0], (i + 1) * block[0])
                column = slice(j * block[1], (j + 1) * block[1])
                yield ((*lead, i, j), (*lead, row, column)) if len(shape) > 1 else ((j,), (column,))


def by_blocks(block):
    def back(q, fmt, dtype):
        return f8.dequantize_blockwise(*q, fmt, block, dtype)

    return lambda x, fmt, policy: f8.quantize_blockwise(x, fmt, block, policy), back, lambda s: block_parts(s, block)


def microscaled(mode):
    def back(q, fmt, dtype):
        return f8.dequantize_mx(*q, fmt, dtype)

    return lambda x, fmt, _: f8.quantize_mx(x, fmt, mode), back, lambda shape: block_parts(shape, (1, 32))


CUTS = {"rows": by_rows(-1), "columns": by_rows(0)} | {f"{rows}x{n}": by_blocks((rows, n)) for rows, n in BLOCKS}
CUTS |= {f"MX {mode}": microscaled(mode) for mode in MX_MODES}


@pytest.mark.matrix(
    cut=CUTS,
    shape=[(5, 300), (130, 140), (1, 1), (3, 128), (2, 3, 129), (0, 128), (4, 0), (257,)],
    fmt=f8.formats.DATA_FORMATS,
    dtype=DTYPES,
    policy=[f8.CANONICAL, f8.POWER_OF_2, te_current(eps=1e-12), te_current(pow2=True)],
)
def test_every_part_is_cast_and_comes_back_as_a_tensor_of_its_own(cut, shape, fmt, dtype, policy):
    if len(shape) == 1 and cut in ("128x128", "3x50"):
        cut = "1x32"  # others cannot cut one dimension
    x, (cast, back, parts) = data(shape, dtype), CUTS[cut]
    found, is_mx = cast(x, fmt, policy), cut.startswith("MX")
    assert (found.data.shape, found.data.dtype, found.scale.dtype) == (shape, np.uint8, (np.float32, np.uint8)[is_mx])
    policy, scales = (mx(cut.split()[1]), f8.numerics.e8m0_to_scale(found.scale)) if is_mx else (policy, found.scale)
    assert [where for where, _ in parts(shape)] == list(np.ndindex(scales.shape))
    values = back(found, fmt, dtype)
    with np.errstate(invalid="ignore"):
        wide = x.astype(np.float32)
    for where, part in parts(shape):
        scale = np.float32(f8.amax_to_scale(f8.amax(wide[part]), fmt, policy))
        assert_same_bits(scales[where], scale)
        assert_same_bits(found.data[part], f8.quantize(wide[part], scale, fmt), fmt=fmt, source=x[part], seed=SEED)
        assert_same_bits(values[part], f8.dequantize(found.data[part], scale, fmt, dtype))


@formats
def test_the_matmul_is_rounded_to_float32_before_the_cast(fmt):
    scale = np.linspace(1, 2, 500, dtype=np.float32)[:, None]
    x = midpoints(fmt) / scale
    exact = x.astype(np.float64) * scale
    assert_same_bits(f8.quantize(x, scale, fmt), f8.numerics.encode(exact.astype(np.float32), fmt), fmt=fmt, source=x)
    assert (f8.quantize(x, scale, fmt) != f8.numerics.encode(exact, fmt)).any(), "one rounding would give other codes"


def test_scales_at_their_limits_and_torchaos_for_an_infinite_amax():
    x = np.float32([1, -1, 0, 1e-45, np.inf, np.nan])
    for scale, want in ((2.0**100, [448, -448, 0, 0]), (2.0**-126, [0] * 4), (2, [2, -2, 0, 0]), (0, [0] * 4)):
        found = f8.numerics.decode(f8.quantize(x, np.float32(scale), "e4m3"), "e4m3")
        assert found[:4].tolist() == want
        assert np.isnan(found[4:]).all()


@formats
@pytest.mark.parametrize("scale", [-3.0, 2.0**-90, 0.7, 2.0**100, np.inf])
@pytest.mark.parametrize(
    "cast", [f8.quantize, lambda *args: f8.numerics.quantize_stochastic(*args, np.zeros(4, np.uint32))]
)
def test_infinity_becomes_nan_and_a_matmul_that_overflows_saturates(fmt, scale, cast):
    x, scale, top = (
        np.float32([np.inf, -np.inf, np.nan, 3e38]),
        np.float32(scale),
        np.float32(f8.formats.get_format(fmt).max),
    )
    found = f8.numerics.decode(cast(x, scale, fmt), fmt)
    assert np.isnan(found[:3]).all()
    assert found[3] == np.copysign(top, scale)


def test_mx_rounds_its_scales_with_rceil_unless_told_otherwise():
    x = np.full((1, 32), 449, np.float32)
    assert isinstance(f8.quantize_mx(x, "e4m3"), f8.numerics.Quantized)
    assert f8.quantize_mx(x, "e4m3").scale == 128
    assert f8.quantize_mx(x, "e4m3", "floor").scale == 127


@formats
@pytest.mark.parametrize("dtype", DTYPES)
def test_dequantize_multiplies_by_the_rounded_reciprocal_and_rounds_to_float32_first(fmt, dtype):
    codes, scale = np.arange(256, dtype=np.uint8), np.random.default_rng(SEED).uniform(1, 2, (5000, 1))
    scale = scale.astype(np.float32)
    inverse = (1 / scale.astype(np.float64)).astype(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        exact = f8.numerics.decode(codes, fmt).astype(np.float64) * inverse
        found = f8.dequantize(codes, scale, fmt, dtype)
        assert found.dtype == dtype
        assert_same_bits(found, exact.astype(np.float32).astype(dtype), seed=SEED)
        if dtype == np.float32:
            assert (found != f8.numerics.decode(codes, fmt) / scale).mean() > 0.2, (
                "dividing by the scale is another number"
            )
        if dtype == np.float16:
            assert (found != exact.astype(np.float16)).any(), "one rounding would give other values"
