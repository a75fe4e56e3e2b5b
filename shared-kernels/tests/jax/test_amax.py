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


@pytest.mark.parametrize("shape", [(1 << 16,), (512, 128), (3, 8, 4096), (257, 300)])
@pytest.mark.parametrize(("keepdims", "dtype"), [(False, "float32"), (True, "float32"), (False, "bfloat16")])
def test_large_arrays_are_compared_exactly_wherever_the_largest_is(shape, keepdims, dtype):
    largest = jax.jit(lambda x: f8.amax(x, keepdims=keepdims))
    for place in (0, 1, 5 * shape[-1] + 3, int(np.prod(shape)) - 1):
        for value, rest in ((np.nan, np.inf), (-np.inf, 3.0), (-1e-45, 0.0), (3e-39, -2e-39), (-7.0, 6.9)):
            x = np.full(shape, rest, dtype)
            x.reshape(-1)[place % x.size] = value
            assert_same_bits(np.asarray(largest(x)), fp8_common.amax(x, keepdims=keepdims))


def test_sharded_large_arrays_are_compared_exactly(mesh):
    x = np.random.default_rng(0).normal(size=(64, 4096)).astype(np.float32)
    for spec in (("data", None), (None, "data")):
        sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))
        assert_same_bits(np.asarray(jax.jit(f8.amax)(jax.device_put(x, sharding))), fp8_common.amax(x))


def test_arrays_on_meshes_with_explicit_axes_are_not_reshaped(mesh):
    explicit = jax.sharding.Mesh(mesh.devices, ("data",), axis_types=(jax.sharding.AxisType.Explicit,))
    # a row for each device: the rows that are compared first would lie on several
    x = np.random.default_rng(0).normal(size=(8, 1 << 16)).astype(np.float32)
    with jax.set_mesh(explicit):
        sharding = jax.sharding.NamedSharding(explicit, jax.sharding.PartitionSpec("data"))
        assert_same_bits(np.asarray(jax.jit(f8.amax)(jax.device_put(x, sharding))), fp8_common.amax(x))
