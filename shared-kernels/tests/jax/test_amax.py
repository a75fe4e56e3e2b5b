"""amax is an exact integer maximum: it counts subnormals, which XLA flushes, and keeps NaN, which XLA may lose."""

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import fp8_common
import fp8_common.jax as f8
from fp8_common.testing import assert_same_bits


@pytest.mark.matrix(
    "each",
    shape=[(1 << 16,), (512, 128), (3, 8, 4096), (257, 300)],
    keepdims=[False, True],
    dtype=["float32", "bfloat16"],
    axis=[None, -1, 0],
)
def test_large_arrays_are_compared_exactly_wherever_the_largest_is(shape, keepdims, dtype, axis):
    largest = jax.jit(lambda x: f8.amax(x, axis=axis, keepdims=keepdims))
    for place in (0, 1, 5 * shape[-1] + 3, int(np.prod(shape)) - 1):
        for value, rest in ((np.nan, np.inf), (-np.inf, 3.0), (-1e-45, 0.0), (3e-39, -2e-39), (-7.0, 6.9)):
            x = np.full(shape, rest, dtype)
            x.reshape(-1)[place % x.size] = value
            assert_same_bits(np.asarray(largest(x)), fp8_common.amax(x, axis=axis, keepdims=keepdims))


@pytest.mark.parametrize("spec", [P("data"), P(None, "data")], ids=str)
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_sharded_large_arrays_are_compared_exactly(mesh, spec, kind):
    """Explicit axes: a row for each device; the rows that are compared first would lie on several if reshaped."""
    mesh = Mesh(mesh.devices, ("data",), axis_types=(kind,))
    x = np.random.default_rng(0).normal(size=(8, 1 << 16)).astype(np.float32)
    with jax.set_mesh(mesh):
        shards = jax.device_put(x, NamedSharding(mesh, spec))
        assert_same_bits(np.asarray(jax.jit(f8.amax)(shards)), fp8_common.amax(x))
