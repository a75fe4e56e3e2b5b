"""Stochastic rounding: exact for representable values, unbiased, and decided by the given bits alone."""

import numpy as np
import pytest

from fp8_common import Fp8Error
from fp8_common.formats import DATA_FORMATS
from fp8_common.numerics import decode, encode, encode_stochastic, quantize_stochastic
from fp8_common.testing import adversarial, all_codes, assert_same_bits

SEED = 7
formats = pytest.mark.parametrize("fmt", DATA_FORMATS, ids=str)


def draw(shape):
    return np.random.default_rng(SEED).integers(0, 2**32, shape, dtype=np.uint32)


def rounded(x, fmt, word):
    return encode_stochastic(x, fmt, np.full(x.shape, word, np.uint32))


@formats
@pytest.mark.parametrize("word", [0, 0x1FF, 0x200, 2**31, 2**32 - 1])
def test_representable_values_do_not_change(fmt, word):
    codes = all_codes(fmt, finite=True)
    assert_same_bits(rounded(decode(codes, fmt), fmt, word), codes, fmt=fmt)
    special = np.float32([np.inf, -np.inf, np.nan, 0.0, -0.0, fmt.max * 1.5, -fmt.max * 1e4])
    assert_same_bits(rounded(special, fmt, word), encode(special, fmt), fmt=fmt, source=special)
    subnormal = np.array([1, 0x7FFFFF], np.uint32).view(np.float32)
    assert decode(rounded(subnormal, fmt, word), fmt).tolist() == [0, 0]


@formats
def test_results_are_one_of_the_two_neighbours(fmt):
    x = adversarial(fmt)
    x = x[np.abs(x) <= fmt.max]
    low, high = (decode(rounded(x, fmt, word), fmt) for word in (2**32 - 1, 0))
    assert (np.abs(low) <= np.abs(x)).all()
    # f below 2^-24 never rounds up, by the definition of the threshold
    assert ((np.abs(high) >= np.abs(x)) | (np.abs(x) < fmt.smallest_subnormal * 2.0**-24)).all()
    found = decode(encode_stochastic(x, fmt, draw(x.shape)), fmt)
    assert ((found == low) | (found == high)).all()


@formats
@pytest.mark.parametrize("fraction", [0.1, 0.25, 0.5, 0.9])
@pytest.mark.parametrize("exponent", ["subnormal", "normal"])
def test_unbiased(fmt, fraction, exponent):
    """The mean lies within 5 standard deviations; a fair rounder fails once in 1.7 million draws."""
    count = 200_000
    low, factor = (0.0, 1) if exponent == "subnormal" else (4 * fmt.smallest_normal, 4)
    step = factor * fmt.smallest_subnormal
    x = np.full(count, low + fraction * step, np.float32)
    up = decode(encode_stochastic(x, fmt, draw(count)), fmt) > low
    p = float((np.float64(x[0]) - low) / step)
    assert abs(up.mean() - p) <= 5 * np.sqrt(p * (1 - p) / count), f"seed {SEED}"


def test_the_threshold_uses_the_upper_23_bits_and_is_strict():
    # x is 2^-24 * (2k + 1) of the way from 1 to 1.125, so the threshold of word k equals it: down, and up for k - 1
    k = 5
    x = np.full(4, 1 + 0.125 * (2 * k + 1) * 2.0**-24, np.float64)
    words = np.uint32([(k - 1) << 9 | 0x1FF, k << 9, k << 9 | 0x1FF, (k + 1) << 9])
    assert encode_stochastic(x, "e4m3", words).tolist() == [0x39, 0x38, 0x38, 0x38]


def test_a_scale_is_multiplied_first():
    x, scale = np.random.default_rng(0).normal(size=(64, 64)).astype(np.float32), np.float32(3.3)
    want = encode_stochastic(x * scale, "e5m2", draw(x.shape))
    assert_same_bits(quantize_stochastic(x, scale, "e5m2", draw(x.shape)), want)


def test_random_bits_of_another_dtype_raise():
    with pytest.raises(Fp8Error, match=r"random_bits must be uint32 of shape \(3,\), got .*rng\.integers"):
        encode_stochastic(np.ones(3, np.float32), "e4m3", np.zeros(3, np.int64))
