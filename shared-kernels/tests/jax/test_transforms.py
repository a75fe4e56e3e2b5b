"""Every operation works under jit, vmap, grad, jvp and shard_map; gradients are zero or straight through."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import fp8_common.jax as f8
from fp8_common import E4M3
from fp8_common.testing import assert_same_bits

SHARDED = PartitionSpec("data")
SCALE = np.float32(3)

# Each takes [rows, 256] and treats rows alone, so that it may be split or mapped over them.
BY_ROW = {
    "encode": lambda x: f8.encode(x, E4M3),
    "encode_stochastic": lambda x: f8.encode_stochastic(x, E4M3, jax.lax.bitcast_convert_type(x, jnp.uint32)),
    "decode": lambda x: f8.decode(f8.encode(x, E4M3), E4M3),
    "amax": lambda x: f8.amax(x, axis=-1),
    "amax_to_scale": lambda x: f8.amax_to_scale(f8.amax(x, axis=-1), E4M3),
    "amax_to_scale_inv": lambda x: f8.amax_to_scale_inv(f8.amax(x, axis=-1), E4M3),
    "reciprocal": f8.reciprocal,
    "quantize": lambda x: f8.quantize(x, SCALE, E4M3),
    "quantize_stochastic": lambda x: f8.quantize_stochastic(x, SCALE, E4M3, jnp.zeros(x.shape, jnp.uint32)),
    "dequantize": lambda x: f8.dequantize(f8.quantize(x, SCALE, E4M3), SCALE, E4M3),
    "dequantize to bfloat16": lambda x: f8.dequantize(f8.quantize(x, SCALE, E4M3), SCALE, E4M3, jnp.bfloat16),
    "quantize_rowwise": lambda x: f8.quantize_rowwise(x, E4M3),
    "quantize_blockwise": lambda x: f8.quantize_blockwise(x, E4M3),
    "dequantize_blockwise": lambda x: f8.dequantize_blockwise(*f8.quantize_blockwise(x, E4M3), E4M3),
    "quantize_mx": lambda x: f8.quantize_mx(x, E4M3),
    "dequantize_mx": lambda x: f8.dequantize_mx(*f8.quantize_mx(x, E4M3), E4M3),
    "amax_to_e8m0": lambda x: f8.amax_to_e8m0(x, E4M3),
    "e8m0_to_scale": lambda x: f8.e8m0_to_scale(f8.amax_to_e8m0(x, E4M3)),
    "e8m0_to_scale_inv": lambda x: f8.e8m0_to_scale_inv(f8.amax_to_e8m0(x, E4M3)),
    "update_history": lambda x: f8.update_history(jnp.ones((4, *x.shape), jnp.float32), x)[1],
    "fake_quantize": lambda x: f8.fake_quantize(x, SCALE, E4M3),
}
operations = pytest.mark.parametrize("operation", BY_ROW.values(), ids=BY_ROW)
without_gradient = pytest.mark.parametrize(
    "operation", [one for name, one in BY_ROW.items() if name != "fake_quantize"], ids=[*BY_ROW][:-1]
)


@pytest.fixture
def x():
    values = np.random.default_rng(3).standard_normal((16, 256)).astype(np.float32)
    values[2] *= np.float32(2.0**-130)
    return values


def assert_same(got, want):
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert_same_bits(one, other)


def test_every_operation_is_in_the_list():
    assert {name.split()[0] for name in BY_ROW} == set(f8.__all__) - {"Quantized"}


@operations
@pytest.mark.parametrize("transform", [jax.jit, jax.vmap])
def test_transformed_equals_eager(operation, transform, x):
    """Unused lanes and constants must not make a NaN either where neither the input nor the result has one."""
    assert_same(transform(operation)(x), operation(x))
    with jax.debug_nans(True):
        operation(x)
        operation(np.zeros_like(x))


@pytest.mark.matrix("each", name=list(BY_ROW), check_vma=[True, False])
def test_shard_map(name, x, mesh, check_vma):
    operation = BY_ROW[name]
    mapped = jax.shard_map(operation, mesh=mesh, in_specs=SHARDED, out_specs=SHARDED, check_vma=check_vma)
    assert_same(jax.jit(mapped)(x), operation(x))


@operations
def test_sharded_arrays_and_explicit_shardings(operation, x, mesh):
    auto = jax.jit(operation)(jax.device_put(x, NamedSharding(mesh, SHARDED)))
    assert_same(auto, operation(x))
    explicit = jax.make_mesh(mesh.devices.shape, ("data",), (jax.sharding.AxisType.Explicit,), devices=mesh.devices)
    assert_same(jax.jit(operation)(jax.device_put(x, NamedSharding(explicit, SHARDED))), auto)


@without_gradient
def test_gradients_are_zero(operation, x):
    def total(x):
        return sum(jnp.sum(leaf.astype(jnp.float32)) for leaf in jax.tree.leaves(operation(x)))

    assert not jax.grad(total)(x[:2]).any()
    assert float(jax.jvp(total, (x[:2],), (x[:2],))[1]) == 0


def test_amax_over_devices_is_exact(x, mesh):
    def over_all(x):
        bits = jax.lax.bitcast_convert_type(f8.amax(x), jnp.int32)
        return jax.lax.bitcast_convert_type(jax.lax.pmax(bits, "data"), jnp.float32)

    mapped = jax.shard_map(over_all, mesh=mesh, in_specs=SHARDED, out_specs=PartitionSpec())
    x[9, 9] = np.nan
    assert np.isnan(mapped(x))
    assert float(mapped(x[:8] * np.float32(0) + np.float32(2.0**-149))) == 2.0**-149


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
def test_fake_quantize_passes_gradients_straight_through(x, dtype):
    x = jnp.asarray(x, dtype).at[0, 0].set(1e6)  # saturates, and its gradient passes all the same
    weight = jnp.arange(x.size, dtype=jnp.float32).reshape(x.shape).astype(dtype)

    def loss(x, scale):
        return jnp.sum((f8.fake_quantize(x, scale, E4M3) * weight).astype(jnp.float32))

    to_x, to_scale = jax.jit(jax.grad(loss, argnums=(0, 1)))(x, jnp.float32(3))
    assert_same_bits(to_x, weight)
    assert float(to_scale) == 0


def test_fake_quantize_forward_mode_transpose_and_second_derivative(x):
    def there_and_back(x):
        return f8.fake_quantize(x, SCALE, E4M3)

    value, tangent = jax.jvp(there_and_back, (x,), (2 * x,))
    assert_same_bits(value, BY_ROW["dequantize"](x))
    assert_same_bits(tangent, 2 * x)
    (transposed,) = jax.linear_transpose(jax.linearize(there_and_back, x)[1], x)(x)
    assert_same_bits(transposed, x)
    assert not jax.hessian(lambda x: there_and_back(x).sum())(x[0, :3]).any()
    assert_same_bits(jax.grad(lambda x: there_and_back(x).sum())(x), np.ones_like(x))


def test_fake_quantize_gradient_under_vmap_and_shard_map(x, mesh):
    def loss(x):
        return jnp.sum(f8.fake_quantize(x, SCALE, E4M3) ** 2, axis=-1)

    want = 2 * BY_ROW["dequantize"](x)
    assert_same_bits(jax.vmap(jax.grad(loss))(x), want)
    mapped = jax.shard_map(loss, mesh=mesh, in_specs=SHARDED, out_specs=SHARDED)
    assert_same_bits(jax.grad(lambda x: mapped(x).sum())(x), want)
