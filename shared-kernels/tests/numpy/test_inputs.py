"""The adversarial inputs hold the values that their docstrings name."""

import ml_dtypes
import numpy as np
import pytest

from fp8_common import E8M0, Fp8Error, amax_to_scale, quantize
from fp8_common.formats import DATA_FORMATS, FORMATS
from fp8_common.numerics import decode
from fp8_common.testing import adversarial, adversarial_amax, all_codes, midpoints, special_values

formats = pytest.mark.parametrize("fmt", DATA_FORMATS, ids=str)
dtypes = pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32])


@formats
def test_every_midpoint_is_there_with_its_float32_neighbours(fmt):
    values = np.unique(decode(all_codes(fmt, finite=True), fmt).astype(np.float64))
    want, found = ((values[1:] + values[:-1]) / 2).astype(np.float32), midpoints(fmt)
    for one in (want, np.nextafter(want, np.float32(-np.inf)), np.nextafter(want, np.float32(np.inf))):
        assert np.isin(one, found).all()
    assert fmt.max < np.abs(found).max() < fmt.max * 1.2, "and the one above the maximum"


@dtypes
def test_special_values(dtype):
    x, info = special_values(dtype), ml_dtypes.finfo(dtype)
    with np.errstate(invalid="ignore"):
        exact = x.astype(np.float64)
    positive = [0, float(info.smallest_subnormal), float(info.smallest_normal), float(info.max), 1, np.inf]
    assert np.isin([*positive, *(-value for value in positive)], exact).all()
    assert np.signbit(exact[exact == 0]).tolist() == [False, True]
    assert np.unique(x[np.isnan(exact)].view(f"u{x.itemsize}")).size == 8


def test_finite_codes_are_all_that_stand_for_a_number():
    for fmt, count in zip(FORMATS.values(), (254, 248, 255, 255, 255), strict=True):
        finite = all_codes(fmt.name, finite=True)
        assert finite.size == count, fmt
        assert np.isfinite(decode(finite, fmt)).all()


@formats
@dtypes
@pytest.mark.parametrize("scale", [1.0, 0.7, 2.0**-40, 2.0**40])
def test_adversarial_inputs_reach_every_code_infinity_and_nan(fmt, dtype, scale):
    x = adversarial(fmt, dtype, scale)
    assert x.dtype == dtype
    with np.errstate(invalid="ignore"):
        assert not {"inf", "nan"} - set(map(str, x.astype(np.float32)))
    if dtype != np.float16 or scale in (1.0, 0.7):
        missing = ~np.isin(all_codes(fmt, finite=True), quantize(x, np.float32(scale), fmt))
        assert missing.sum() <= (3 if dtype == np.float16 and fmt.exponent_bits == 5 else 0), "subnormals"


def test_adversarial_amax_reaches_every_limit():
    amax = adversarial_amax()
    assert not np.signbit(amax).any()
    assert np.isin([0, np.inf, 448, 57344, 240, np.float32(1e-12), np.float32(1e-4)], amax).all()
    assert np.isnan(amax).any()
    assert ((amax > 0) & (amax < 2.0**-126)).any()
    for fmt in DATA_FORMATS:
        scale = amax_to_scale(amax, fmt)
        assert (scale == 2.0**100).any()
        assert ((scale < 2.0**100) & (scale > 2.0**99)).any()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: special_values(np.float64), "dtype must be float16, bfloat16 or float32, got float64"),
        (lambda: adversarial("e4m3", scale=np.nan), "scale must be positive and finite"),
        (lambda: midpoints(E8M0), "E8M0 holds block scales"),
    ],
)
def test_bad_arguments_raise(call, message):
    with pytest.raises(Fp8Error, match=message):
        call()
