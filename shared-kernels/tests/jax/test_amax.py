"""amax is an exact integer maximum: it counts subnormals, which XLA flushes, and keeps NaN, which XLA may lose."""

import jax
import numpy as np
import pytest

import fp8_common
import fp8_common.jax as f8
from fp8_common import Fp8Error
from fp8_common.testing import all_bfloat16, all_float16, assert_same_bits, special_values


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_every_value_alone(dtype):
    x = {"float16": all_float16, "bfloat16": all_bfloat16, "float32": special_values}[dtype]()
    assert_same_bits(f8.amax(x[:, None], axis=1), fp8_common.amax(x[:, None], axis=1), source=x)


def test_subnormals_count():
    x = np.float32([2.0**-149, -(2.0**-130), 0])
    assert float(jax.jit(f8.amax)(x)) == 2.0**-130
    assert float(f8.amax(x[:1])) == 2.0**-149


@pytest.mark.parametrize("place", [0, 1, 17, 128 * 1024 - 1])
@pytest.mark.parametrize("axis", [None, -1, 0])
def test_nan_reaches_the_result_from_anywhere(place, axis):
    x = np.random.default_rng(1).standard_normal(128 * 1024).astype(np.float32)
    x[place] = np.nan
    x = x.reshape(128, 1024)
    got = jax.jit(lambda x: f8.amax(x, axis=axis))(x)
    assert_same_bits(got, fp8_common.amax(x, axis=axis))
    assert np.isnan(got).sum() == 1


def test_infinity_is_the_largest_number_and_nan_is_beyond_it():
    assert float(f8.amax(np.float32([1, -np.inf]))) == np.inf
    assert np.isnan(f8.amax(np.float32([np.inf, np.nan])))


@pytest.mark.parametrize(("shape", "axis", "want"), [((0,), None, ()), ((0, 3), 0, (3,)), ((3, 0), (0, -1), ())])
def test_empty_is_zero(shape, axis, want):
    got = f8.amax(np.zeros(shape, np.float32), axis=axis)
    assert got.shape == want
    assert not got.any()


def test_axes_and_kept_dimensions():
    x = np.random.default_rng(2).standard_normal((2, 3, 4)).astype(np.float16)
    for axis in (0, -1, (0, 2), [1, -1], None):
        for keep in (False, True):
            assert_same_bits(f8.amax(x, axis, keep), fp8_common.amax(x, axis, keep))


def test_integers_are_refused():
    with pytest.raises(Fp8Error, match="got int32"):
        f8.amax(np.int32([1]))
