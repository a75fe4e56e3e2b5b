"""encode and decode equal ml_dtypes, clipped."""

import ml_dtypes
import numpy as np
import pytest

from fp8_common import Fp8Error
from fp8_common.formats import DATA_FORMATS, FORMATS
from fp8_common.numerics import decode, encode
from fp8_common.testing import adversarial, all_bfloat16, all_codes, all_float16, assert_same_bits, midpoints

formats = pytest.mark.parametrize("fmt", DATA_FORMATS, ids=str)
SEED = 20240607


@formats
def test_every_16_bit_float_midpoints_and_any_float32_encode_as_ml_dtypes_does(fmt):
    """ml_dtypes does not saturate, so that values are clipped before; infinity is NaN."""
    drawn = np.random.default_rng(SEED).integers(0, 2**32, 500_000, dtype=np.uint32).view(np.float32)
    for x in (all_bfloat16(), all_float16(), adversarial(fmt), drawn):
        with np.errstate(invalid="ignore"):
            exact = x.astype(np.float32)
            exact[np.isinf(exact)] = np.nan
            want = np.clip(exact, -fmt.max, fmt.max).astype(fmt.numpy_dtype)
        assert_same_bits(encode(x, fmt), want, fmt=fmt, source=x, seed=SEED)


@formats
def test_float64_is_rounded_once(fmt):
    ties = midpoints(fmt)[1::3]
    ties = ties[np.abs(ties) < fmt.max]
    for direction in (-np.inf, np.inf):
        # nearer to the tie than any float32: rounding to float32 first would land on it, and go to the even code
        close = np.nextafter(ties.astype(np.float64), direction)
        further = np.nextafter(ties, np.float32(direction))
        assert_same_bits(encode(close, fmt), encode(further, fmt), fmt=fmt, source=close)


@formats
def test_nan_infinity_and_zero_keep_their_sign_where_the_format_has_two(fmt):
    sign = 0 if fmt.fnuz else 0x80
    nan = np.array([0x7FC00000, 0xFFC00000, 0x7F800001, 0xFFFFFFFF], np.uint32).view(np.float32)
    assert encode(nan, fmt).tolist() == [fmt.nan_code, fmt.nan_code | sign] * 2
    assert encode(np.float32([0.0, -0.0, -1e-30]), fmt).tolist() == [0, sign, sign]
    for dtype in (np.float16, ml_dtypes.bfloat16, np.float32, np.float64):
        infinities = encode(np.array([np.inf, -np.inf], dtype), fmt)
        assert infinities.tolist() == [fmt.nan_code, fmt.nan_code | sign]


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=str)
def test_every_code_decodes_as_ml_dtypes_does_and_finite_ones_survive_the_round_trip(fmt):
    codes = all_codes(fmt)
    assert_same_bits(decode(codes, fmt), codes.view(fmt.numpy_dtype).astype(np.float32), source=codes)
    assert_same_bits(decode(codes.view(fmt.numpy_dtype), fmt), decode(codes, fmt))
    if fmt.signed:
        finite = all_codes(fmt, finite=True)
        assert_same_bits(encode(decode(finite, fmt), fmt), finite, fmt=fmt)


def test_codes_of_another_format_raise():
    with pytest.raises(Fp8Error, match="got float8_e5m2"):
        decode(np.zeros(2, ml_dtypes.float8_e5m2), "e4m3")
