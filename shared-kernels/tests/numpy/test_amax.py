"""amax: an integer maximum, independent of order, exact for subnormals, keeping NaN."""

import ml_dtypes
import numpy as np
import pytest

from fp8_common import Fp8Error, amax
from fp8_common.testing import all_bfloat16, all_float16, assert_same_bits


def floats(*bits):
    return np.array(bits, np.uint32).view(np.float32)


@pytest.mark.parametrize(
    ("x", "want"),
    [
        ([], 0.0),
        ([0.0, -0.0], 0.0),
        ([1.0, -3.0, 2.0], 3.0),
        ([1e-40, -2e-40], 2e-40),
        ([3e38, -np.inf], np.inf),
        ([np.inf, np.nan, 1.0], np.nan),
        ([np.nan], np.nan),
    ],
)
def test_values(x, want):
    assert_same_bits(amax(np.array(x, np.float32)), np.float32(want))


def test_the_sign_of_zero_and_of_nan_is_cleared():
    assert np.signbit(amax(np.float32([-0.0]))) == 0
    assert amax(floats(0xFFC00000)).view(np.uint32) == 0x7FC00000


@pytest.mark.parametrize("position", [0, 3, 7])
def test_a_nan_is_found_wherever_it_is(position):
    x = np.arange(8, dtype=np.float32)
    x[position] = np.nan
    assert np.isnan(amax(x))
    x[(position + 1) % 8] = np.inf
    assert np.isnan(amax(x))


def test_subnormals_are_not_flushed():
    assert amax(floats(1, 0x80000002)).view(np.uint32) == 2


@pytest.mark.parametrize("inputs", [all_bfloat16, all_float16], ids=["bfloat16", "float16"])
def test_every_16_bit_float_is_its_own_amax(inputs):
    x = inputs()
    with np.errstate(invalid="ignore"):
        want = np.abs(x.astype(np.float32))
    assert_same_bits(amax(x[:, None], axis=1), want, source=x)


@pytest.mark.parametrize(
    ("axis", "keepdims", "shape"),
    [(None, False, ()), (0, False, (3, 4)), (-1, True, (2, 3, 1)), ((0, 2), False, (3,)), ([0, 1], True, (1, 1, 4))],
)
def test_axes(axis, keepdims, shape):
    x = np.random.default_rng(1).normal(size=(2, 3, 4)).astype(np.float32)
    found = amax(x, axis=axis, keepdims=keepdims)
    assert found.shape == shape
    assert found.dtype == np.float32
    axes = tuple(axis) if isinstance(axis, list) else axis
    assert np.array_equal(found, np.abs(x).max(axis=axes, keepdims=keepdims))


def test_empty_reductions_are_zero():
    assert amax(np.zeros((3, 0), np.float32), axis=1).tolist() == [0, 0, 0]
    assert amax(np.zeros((0, 2), ml_dtypes.bfloat16), axis=0).tolist() == [0, 0]


@pytest.mark.parametrize("dtype", [np.float64, np.int32, np.uint8, ml_dtypes.float8_e4m3fn])
def test_other_dtypes_are_refused(dtype):
    with pytest.raises(Fp8Error, match=r"x must be float16, bfloat16 or float32, got .* Convert it to float32"):
        amax(np.ones(3, dtype))
