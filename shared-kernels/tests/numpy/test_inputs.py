"""The adversarial inputs hold the values that their docstrings name."""

import ml_dtypes
import numpy as np
import pytest

from fp8_common import DATA_FORMATS, E8M0, FORMATS, Fp8Error, amax_to_scale, decode, encode, quantize
from fp8_common.testing import (
    adversarial,
    adversarial_amax,
    all_bfloat16,
    all_codes,
    all_float16,
    midpoints,
    special_values,
)

formats = pytest.mark.parametrize("fmt", DATA_FORMATS, ids=str)
dtypes = pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32])


def finite_values(fmt):
    return np.unique(decode(all_codes(fmt, finite=True), fmt).astype(np.float64))


@formats
def test_every_midpoint_is_there_with_its_float32_neighbours(fmt):
    values = finite_values(fmt)
    want = (values[1:] + values[:-1]) / 2
    found = midpoints(fmt)
    assert found.dtype == np.float32
    for side in (-np.inf, np.inf):
        assert np.isin(np.nextafter(want.astype(np.float32), np.float32(side)), found).all()
    assert np.isin(want, found).all()
    # three for each middle, and for the one above the maximum on both sides
    assert found.size == 3 * (want.size + 2)
    assert fmt.max < np.abs(found).max() < fmt.max * 1.2


@formats
def test_rounding_changes_on_the_way_across_every_midpoint(fmt):
    below, _, above = midpoints(fmt)[: midpoints(fmt).size // 2].reshape(-1, 3).T
    low, high = encode(below, fmt).astype(int), encode(above, fmt).astype(int)
    assert (high[:-1] == low[:-1] + 1).all()


@dtypes
def test_special_values(dtype):
    x = special_values(dtype)
    assert x.dtype == dtype
    info = ml_dtypes.finfo(dtype)
    with np.errstate(invalid="ignore"):
        exact = x.astype(np.float64)
    positive = [0, float(info.smallest_subnormal), float(info.smallest_normal), float(info.max), 1, np.inf]
    assert np.isin([*positive, *(-value for value in positive)], exact).all()
    assert (exact == 0).sum() == 2
    assert np.signbit(exact[exact == 0]).tolist() == [False, True]
    nans = x[np.isnan(exact)].view(f"u{np.dtype(dtype).itemsize}")
    assert np.unique(nans).size == nans.size == 8
    assert np.signbit(exact[np.isnan(exact)]).sum() == 4
    between = (np.abs(exact) > 0) & (np.abs(exact) < float(info.smallest_normal))
    assert between.sum() == 8


def test_all_sixteen_bit_floats():
    for x, dtype in ((all_bfloat16(), ml_dtypes.bfloat16), (all_float16(), np.float16)):
        assert x.dtype == dtype
        assert np.array_equal(x.view(np.uint16), np.arange(65536))


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=str)
def test_all_codes(fmt):
    assert np.array_equal(all_codes(fmt), np.arange(256))
    finite = all_codes(fmt.name, finite=True)
    count = {"e4m3": 254, "e5m2": 248, "e4m3fnuz": 255, "e5m2fnuz": 255, "e8m0": 255}[fmt.name]
    assert finite.size == count
    assert np.isfinite(decode(finite, fmt)).all()


@formats
@dtypes
@pytest.mark.parametrize("scale", [1.0, 0.7, 2.0**-40, 2.0**40])
def test_adversarial_inputs_reach_every_code_and_both_sides_of_ties(fmt, dtype, scale):
    x = adversarial(fmt, dtype, scale)
    assert x.dtype == dtype
    codes = np.unique(quantize(x, np.float32(scale), fmt))
    if dtype != np.float16 or scale in (1.0, 0.7):
        subnormal = 3 if dtype == np.float16 and fmt.exponent_bits == 5 else 0
        assert np.isin(all_codes(fmt, finite=True), codes).sum() >= all_codes(fmt, finite=True).size - subnormal
    if dtype == np.float32:
        with np.errstate(all="ignore"):
            product = x * np.float32(scale)
        # not every float32 is a product with 0.7
        assert np.isin(midpoints(fmt), product).mean() >= (0.6 if scale == 0.7 else 1.0)
    with np.errstate(invalid="ignore"):
        assert np.isnan(x.astype(np.float32)).any()
        assert np.isinf(x.astype(np.float32)).any()


def test_adversarial_amax_reaches_every_limit():
    amax = adversarial_amax()
    assert amax.dtype == np.float32
    assert np.unique(amax.view(np.uint32)).size == amax.size
    assert not np.signbit(amax).any()
    assert np.isin([0, np.inf, 448, 57344, 240, np.float32(1e-12), np.float32(1e-4)], amax).all()
    assert np.isnan(amax).sum() >= 2
    assert ((amax > 0) & (amax < 2.0**-126)).sum() >= 4
    for fmt in DATA_FORMATS:
        scale = amax_to_scale(amax, fmt)
        assert (scale == 2.0**100).any()
        assert ((scale < 2.0**100) & (scale > 2.0**99)).any()


def test_bad_arguments_are_refused():
    with pytest.raises(Fp8Error, match="dtype must be float16, bfloat16 or float32, got float64"):
        special_values(np.float64)
    with pytest.raises(Fp8Error, match="dtype must be float16"):
        adversarial("e4m3", np.int8)
    for scale in (0.0, -1.0, np.inf, np.nan):
        with pytest.raises(Fp8Error, match="scale must be positive and finite"):
            adversarial("e4m3", scale=scale)
    with pytest.raises(Fp8Error, match="E8M0 holds block scales"):
        midpoints(E8M0)
