"""encode and decode: equal to ml_dtypes (clipped), and to the definition itself."""

import ml_dtypes
import numpy as np
import pytest

from fp8_common import DATA_FORMATS, E5M2, FORMATS, Fp8Error, decode, encode
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
def test_what_is_no_number_between_the_limits(fmt):
    sign = 0 if fmt.fnuz else 0x80  # FNUZ formats have one NaN and one zero
    nan = np.array([0x7FC00000, 0xFFC00000, 0x7F800001, 0xFFFFFFFF], np.uint32).view(np.float32)
    assert encode(nan, fmt).tolist() == [fmt.nan_code, fmt.nan_code | sign] * 2
    assert encode(np.float32([0.0, -0.0, -1e-30]), fmt).tolist() == [0, sign, sign]
    for dtype in (np.float16, ml_dtypes.bfloat16, np.float32, np.float64):
        infinities = encode(np.array([np.inf, -np.inf], dtype), fmt)
        assert infinities.tolist() == [fmt.nan_code, fmt.nan_code | sign]
    over = np.float32([fmt.max * 1.0001, fmt.max * 4, 3e38])
    assert decode(encode(np.append(over, -over), fmt), fmt).tolist() == [fmt.max] * 3 + [-fmt.max] * 3


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=str)
def test_every_code_decodes_as_ml_dtypes_does_and_finite_ones_survive_the_round_trip(fmt):
    codes = all_codes(fmt)
    assert_same_bits(decode(codes, fmt), codes.view(fmt.numpy_dtype).astype(np.float32), source=codes)
    assert_same_bits(decode(codes.view(fmt.numpy_dtype), fmt), decode(codes, fmt))
    if fmt.signed:
        finite = all_codes(fmt, finite=True)
        assert_same_bits(encode(decode(finite, fmt), fmt), finite, fmt=fmt)


def test_e5m2_infinities_decode_to_infinity():
    assert decode(np.uint8([0x7C, 0xFC]), E5M2).tolist() == [np.inf, -np.inf]


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (2, 3, 4)])
def test_shapes_are_kept(shape):
    codes = encode(np.ones(shape, np.float32), "e4m3")
    assert (codes.shape, codes.dtype, decode(codes, "e4m3").shape) == (shape, np.uint8, shape)


def test_the_decoding_table_cannot_be_changed_through_a_result():
    decode(np.uint8([0x38]), "e4m3")[0] = 5
    assert decode(np.uint8([0x38]), "e4m3") == 1


@pytest.mark.parametrize(
    ("function", "x", "fmt", "message"),
    [
        (decode, np.int32([1]), "e4m3", "FP8 codes must be uint8 or float8_e4m3fn, got int32"),
        (decode, np.zeros(2, ml_dtypes.float8_e5m2), "e4m3", "got float8_e5m2"),
        (encode, np.float32([1]), "e8m0", "E8M0 holds block scales"),
    ],
)
def test_bad_codes_and_formats_are_refused(function, x, fmt, message):
    with pytest.raises(Fp8Error, match=message):
        function(x, fmt)
