"""encode and decode: equal to ml_dtypes (clipped), and to the definition itself."""

import ml_dtypes
import numpy as np
import pytest

from fp8_common import DATA_FORMATS, E5M2, FORMATS, Fp8Error, decode, encode
from fp8_common._reference.rounding import as_codes
from fp8_common.testing import (
    adversarial,
    all_bfloat16,
    all_codes,
    all_float16,
    assert_same_bits,
    midpoints,
    special_values,
)

formats = pytest.mark.parametrize("fmt", DATA_FORMATS, ids=str)


def by_ml_dtypes(x, fmt):
    """Round with ml_dtypes, after clipping because it does not saturate; infinity is NaN."""
    with np.errstate(invalid="ignore"):
        exact = np.asarray(x).astype(np.float32)
        exact[np.isinf(exact)] = np.nan
        return np.clip(exact, -fmt.max, fmt.max).astype(fmt.numpy_dtype)


@formats
@pytest.mark.parametrize("inputs", [all_bfloat16, all_float16], ids=["bfloat16", "float16"])
def test_every_16_bit_float_encodes_as_ml_dtypes_does(fmt, inputs):
    x = inputs()
    assert x.size == 65536
    assert_same_bits(encode(x, fmt), by_ml_dtypes(x, fmt), fmt=fmt, source=x)


@formats
def test_float32_boundaries_encode_as_ml_dtypes_does(fmt):
    for x in (midpoints(fmt), adversarial(fmt), special_values(np.float32)):
        assert_same_bits(encode(x, fmt), by_ml_dtypes(x, fmt), fmt=fmt, source=x)


@formats
def test_random_float32_patterns_encode_as_ml_dtypes_does(fmt):
    seed = 20240607
    x = np.random.default_rng(seed).integers(0, 2**32, 500_000, dtype=np.uint32).view(np.float32)
    assert_same_bits(encode(x, fmt), by_ml_dtypes(x, fmt), fmt=fmt, source=x, seed=seed)


@formats
def test_the_nearest_value_wins_and_ties_go_to_the_even_code(fmt):
    codes = np.arange(fmt.max_code + 1, dtype=np.uint8)
    values = decode(codes, fmt).astype(np.float64)
    x = np.abs(midpoints(fmt))
    distance = np.abs(values[None, :] - x[:, None].astype(np.float64))
    nearest = distance == distance.min(axis=1, keepdims=True)
    # two codes are nearest only on a tie; they differ in the lowest bit, so the odd one can be struck out
    nearest &= ~((nearest.sum(axis=1, keepdims=True) == 2) & (codes % 2 == 1))
    assert_same_bits(encode(x, fmt), codes[nearest.argmax(axis=1)], fmt=fmt, source=x)


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
def test_overflow_saturates_with_its_sign_and_infinity_becomes_nan(fmt):
    x = np.float32([fmt.max * 1.0001, fmt.max * 4, 3e38])
    assert decode(encode(x, fmt), fmt).tolist() == [fmt.max] * 3
    assert decode(encode(-x, fmt), fmt).tolist() == [-fmt.max] * 3
    for dtype in (np.float16, ml_dtypes.bfloat16, np.float32, np.float64):
        assert np.isnan(decode(encode(np.array([np.inf, -np.inf], dtype), fmt), fmt)).all()


@formats
def test_nan_stays_nan_with_the_formats_own_code(fmt):
    x = np.array([0x7FC00000, 0xFFC00000, 0x7F800001, 0xFFFFFFFF], np.uint32).view(np.float32)
    sign = 0 if fmt.fnuz else 0x80
    assert encode(x, fmt).tolist() == [fmt.nan_code, fmt.nan_code | sign] * 2
    assert np.isnan(decode(encode(x, fmt), fmt)).all()


@formats
def test_negative_zero_is_kept_where_the_format_has_one(fmt):
    x = np.float32([0.0, -0.0, -1e-30])
    negative = 0x00 if fmt.fnuz else 0x80
    assert encode(x, fmt).tolist() == [0x00, negative, negative]


@formats
def test_every_finite_code_survives_the_round_trip(fmt):
    codes = all_codes(fmt, finite=True)
    assert_same_bits(encode(decode(codes, fmt), fmt), codes, fmt=fmt)


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=str)
def test_every_code_decodes_as_ml_dtypes_does(fmt):
    codes = all_codes(fmt)
    assert_same_bits(decode(codes, fmt), codes.view(fmt.numpy_dtype).astype(np.float32), source=codes)
    assert_same_bits(decode(codes.view(fmt.numpy_dtype), fmt), decode(codes, fmt))


def test_e5m2_infinities_decode_to_infinity():
    assert decode(np.uint8([0x7C, 0xFC]), E5M2).tolist() == [np.inf, -np.inf]


def test_shapes_are_kept():
    for shape in ((), (0,), (3, 0, 2), (2, 3, 4)):
        codes = encode(np.ones(shape, np.float32), "e4m3")
        assert codes.shape == shape
        assert codes.dtype == np.uint8
        assert decode(codes, "e4m3").shape == shape


def test_the_decoding_table_cannot_be_changed_through_a_result():
    values = decode(np.uint8([0x38]), "e4m3")
    values[0] = 5
    assert decode(np.uint8([0x38]), "e4m3") == 1


def test_bad_codes_and_formats_are_refused():
    with pytest.raises(Fp8Error, match="FP8 codes must be uint8 or float8_e4m3fn, got int32"):
        as_codes(np.int32([1]), "e4m3")
    with pytest.raises(Fp8Error, match="got float8_e5m2"):
        decode(np.zeros(2, ml_dtypes.float8_e5m2), "e4m3")
    with pytest.raises(Fp8Error, match="E8M0 holds block scales"):
        encode(np.float32([1]), "e8m0")
