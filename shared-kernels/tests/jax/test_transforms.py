"""Every operation works under jit, vmap, grad, jvp and shard_map, as jnp code and as in programs for a GPU."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

import fp8_common.jax as f8j
import fp8_common.numerics as f8np
from fp8_common import CANONICAL, E4M3, E5M2, Fp8UnsupportedError
from fp8_common.jax import _kernels, casts, compat, numerics, slices
from fp8_common.testing import assert_same_bits

SHARDED, SCALE, SQUARE = PartitionSpec("data"), np.float32(3), (128, 128)


def own_cast(f8, x, fmt, with_amax=False):
    """What layers call, which no public function does."""
    if f8 is f8j:
        return (casts.cast_with_amax if with_amax else casts.cast)(x, SCALE, fmt)
    return (f8.quantize(x, SCALE, fmt), f8.amax(x)) if with_amax else f8.quantize(x, SCALE, fmt)


def of_columns(f8, x):
    return slices.cast_slices(x, E4M3, (0,), CANONICAL) if f8 is f8j else f8.quantize_rowwise(x, E4M3, 0)


def of_both(f8, x):
    if f8 is f8j:
        (data, rows), (turned, columns) = slices.cast_slices_both(x, E4M3, 1, CANONICAL)
        return data, rows, turned, columns
    by_rows, by_columns = (f8.quantize_rowwise(x, E4M3, axis) for axis in (1, 0))
    return *by_rows, by_columns.data.T, by_columns.scale.T


# Each is a function of a module and x [rows, 256], with the operation that stands for it in programs where there is a
# GPU. These treat rows alone, so that they may be split or mapped over them.
BY_ROW = {
    "encode": (lambda f8, x: f8.encode(x, E4M3), None),
    "encode_stochastic": (lambda f8, x: f8.encode_stochastic(x, E4M3, x.view("uint32")), None),
    "decode": (lambda f8, x: f8.decode(f8.encode(x, E4M3), E4M3), None),
    "amax": (lambda f8, x: f8.amax(x, axis=-1), None),
    "amax_to_scale": (lambda f8, x: f8.amax_to_scale(f8.amax(x, axis=-1), E4M3), None),
    "amax_to_scale_inv": (lambda f8, x: f8.amax_to_scale_inv(f8.amax(x, axis=-1), E4M3), None),
    "reciprocal": (lambda f8, x: f8.reciprocal(x), None),
    "quantize": (lambda f8, x: f8.quantize(x, SCALE, E4M3), "fp8_quantize"),
    "quantize_stochastic": (
        lambda f8, x: f8.quantize_stochastic(x, SCALE, E4M3, np.zeros(x.shape, np.uint32)),
        None,
    ),
    "dequantize": (lambda f8, x: f8.dequantize(f8.encode(x, E4M3), SCALE, E4M3), None),
    "dequantize to bfloat16": (lambda f8, x: f8.dequantize(f8.encode(x, E4M3), SCALE, E4M3, jnp.bfloat16), None),
    "quantize_rowwise": (lambda f8, x: f8.quantize_rowwise(x, E4M3), "fp8_rowwise"),
    "quantize_blockwise": (lambda f8, x: f8.quantize_blockwise(x, E4M3), "fp8_blocks"),
    "quantize_blockwise, other": (lambda f8, x: f8.quantize_blockwise(x, E4M3, (1, 64)), None),
    "dequantize_blockwise": (
        lambda f8, x: f8.dequantize_blockwise(*f8.quantize_blockwise(x, E4M3, (1, 64)), E4M3, (1, 64)),
        None,
    ),
    "quantize_mx": (lambda f8, x: f8.quantize_mx(x, E4M3), "fp8_mx"),
    "dequantize_mx": (lambda f8, x: f8.dequantize_mx(f8.encode(x, E4M3), f8.encode(x[..., :8], E4M3), E4M3), None),
    "amax_to_e8m0": (lambda f8, x: f8.amax_to_e8m0(x, E4M3), None),
    "e8m0_to_scale": (lambda f8, x: f8.e8m0_to_scale(f8.amax_to_e8m0(x, E4M3)), None),
    "e8m0_to_scale_inv": (lambda f8, x: f8.e8m0_to_scale_inv(f8.amax_to_e8m0(x, E4M3)), None),
    "update_history": (lambda f8, x: f8.update_history(np.ones((4, *x.shape), np.float32), x)[1], None),
}
OPERATIONS = BY_ROW | {
    "amax of all": (lambda f8, x: f8.amax(x), "fp8_amax_key"),
    "amax of all, kept": (lambda f8, x: f8.amax(x, keepdims=True), "fp8_amax_key"),
    "a scale per row": (lambda f8, x: f8.quantize(x, np.ones((16, 1), np.float32), E4M3), None),
    "columns": (lambda f8, x: f8.quantize_rowwise(x, E4M3, 0), None),
    "128x128": (lambda f8, x: f8.quantize_blockwise(x, E5M2, SQUARE), "fp8_blocks"),
    "cast": (lambda f8, x: own_cast(f8, x, E5M2), "fp8_cast"),
    "with amax": (lambda f8, x: own_cast(f8, x, E4M3, True), "fp8_cast_with_amax"),
    "slices": (of_columns, "fp8_rowwise"),
    "both": (of_both, "fp8_amax_both fp8_cast_both"),
}


@pytest.fixture
def x():
    values = np.random.default_rng(3).standard_normal((16, 256)).astype(np.float32)
    values[2] *= np.float32(2.0**-130)
    return values


# programs without a GPU, which hold no operation, are other ones where an operation stands for something
CASES = [(name, True) for name in OPERATIONS] + [(name, False) for name, (_, one) in OPERATIONS.items() if one]


def select(monkeypatch, kernels):
    """Let programs hold the operations, as where there is a GPU, or not; on a CPU these lower to their references."""
    monkeypatch.setattr(_kernels, "_obstacle", lambda: None if kernels else "this JAX sees no NVIDIA GPU")


def in_jax(name):
    return lambda x: OPERATIONS[name][0](f8j, x)


def assert_same(got, want):
    wanted = want if isinstance(want, tuple) else (want,)
    for one, other in zip(jax.tree.leaves(got), wanted, strict=True):
        found = np.asarray(one)
        assert_same_bits(found.view(np.uint8) if found.itemsize == 1 else found, np.asarray(other))


def test_every_operation_is_in_the_list():
    assert {name.split()[0].rstrip(",") for name in BY_ROW} == set(f8j.__all__) - {"Quantized", "fake_quantize"}


@pytest.mark.parametrize(("name", "kernels"), CASES)
def test_transformed_equals_numpy_and_has_no_gradient(name, kernels, x, monkeypatch):
    """Unused lanes and constants must not make a NaN either where neither the input nor the result has one."""
    select(monkeypatch, kernels)
    operation, (definition, _) = in_jax(name), OPERATIONS[name]
    want = definition(f8np, x)
    with jax.debug_nans(True):
        assert_same(operation(x), want)
        operation(np.zeros_like(x))
    assert_same(jax.jit(operation)(x), want)
    if name in BY_ROW:
        assert_same(jax.vmap(operation)(x), want)
    else:
        both = [definition(f8np, one) for one in (x, x[::-1])]
        pairs = zip(*both, strict=True) if isinstance(want, tuple) else [both]
        assert_same(jax.vmap(operation, in_axes=1)(np.stack([x, x[::-1]], axis=1)), tuple(map(np.stack, pairs)))

    def total(x):
        return sum(jnp.sum(leaf.astype(jnp.float32)) for leaf in jax.tree.leaves(operation(x)))

    assert not jax.jit(jax.grad(total))(x).any()
    assert float(jax.jvp(total, (x,), (x,))[1]) == 0


@pytest.mark.parametrize("name", OPERATIONS)
def test_programs_hold_the_operations_where_there_is_a_gpu(name, x, monkeypatch):
    operation, own = in_jax(name), OPERATIONS[name][1]

    def held():
        return set(re.findall(r"\bfp8_\w+", str(jax.make_jaxpr(lambda x: operation(x))(x))))

    select(monkeypatch, False)
    assert held() == set()
    select(monkeypatch, True)
    assert held() == set((own or "").split())
    monkeypatch.setenv("FP8_COMMON_BACKEND", "reference")
    assert held() == set()


def test_the_cast_path_names_the_obstacle(monkeypatch, x):
    monkeypatch.setenv("FP8_COMMON_BACKEND", "triton")
    select(monkeypatch, False)
    with pytest.raises(Fp8UnsupportedError, match="FP8_COMMON_BACKEND=triton, but this JAX sees no NVIDIA GPU"):
        f8j.amax(x)


def test_an_operation_is_compiled_once_outside_of_jit(monkeypatch, x):
    select(monkeypatch, True)
    f8j.quantize_mx(x, "e5m2")
    kept = _kernels._jitted.cache_info().currsize
    f8j.quantize_mx(2 * x, "e5m2")
    assert _kernels._jitted.cache_info().currsize == kept


# ---------------------------------------------------------------- several devices


@pytest.mark.matrix("each", name=list(BY_ROW), kernels=[True, False], check_vma=[True, True, False, False])
def test_shards_and_sharded_arrays(name, kernels, check_vma, x, mesh, monkeypatch):
    select(monkeypatch, kernels)
    operation, want = in_jax(name), OPERATIONS[name][0](f8np, x)
    mapped = jax.shard_map(operation, mesh=mesh, in_specs=SHARDED, out_specs=SHARDED, check_vma=check_vma)
    assert_same(jax.jit(mapped)(x), want)
    explicit = jax.make_mesh(mesh.devices.shape, ("data",), (AxisType.Explicit,), devices=mesh.devices)
    for kind in (mesh, explicit):
        assert_same(jax.jit(operation)(jax.device_put(x, NamedSharding(kind, SHARDED))), want)


def typed(function, *given):
    """Trace `function` on shards, of which only types are made: no devices are needed."""
    mesh = AbstractMesh((2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    mapped = jax.shard_map(function, mesh=mesh, in_specs=given, out_specs=PartitionSpec())
    jax.eval_shape(mapped, *(jnp.ones((32, 512)) for _ in given))


@pytest.mark.parametrize(("name", "kernels"), CASES)
def test_results_vary_along_the_axes_of_their_operand(name, kernels, monkeypatch):
    select(monkeypatch, kernels)

    def function(x):
        for leaf in jax.tree.leaves(in_jax(name)(x)):
            assert numerics.varying_axes(leaf) == {"data", "model"}
        return jnp.float32(0)

    typed(function, PartitionSpec("data", "model"))


@pytest.mark.parametrize("kernels", [True, False])
def test_an_operand_of_its_own_on_each_device_makes_the_result_its_own(kernels, monkeypatch):
    select(monkeypatch, kernels)

    def function(x, scale):
        assert numerics.varying_axes(f8j.quantize(x, scale[0, 0], "e4m3")) == {"data"}
        return jnp.float32(0)

    typed(function, PartitionSpec(), SHARDED)


@pytest.mark.parametrize("kernels", [True, False])
def test_the_amax_of_one_shard_cannot_be_returned_as_replicated(kernels, monkeypatch):
    select(monkeypatch, kernels)
    with pytest.raises(ValueError, match="out_specs"):
        typed(f8j.amax, SHARDED)


def test_types_without_axes_raise_in_shard_map(monkeypatch):
    """A newer JAX has renamed the attribute."""
    assert numerics.varying_axes(jnp.ones(3)) == frozenset()
    monkeypatch.setattr(compat.jax, "typeof", lambda x: object())

    def function(x):
        with pytest.raises(Fp8UnsupportedError, match="cannot run in shard_map"):
            numerics.varying_axes(object())
        return jnp.float32(0)

    typed(function, PartitionSpec())


def test_amax_over_devices_is_exact(x, mesh):
    def over_all(x):
        bits = jax.lax.bitcast_convert_type(f8j.amax(x), jnp.int32)
        return jax.lax.bitcast_convert_type(jax.lax.pmax(bits, "data"), jnp.float32)

    mapped = jax.shard_map(over_all, mesh=mesh, in_specs=SHARDED, out_specs=PartitionSpec())
    x[9, 9] = np.nan
    assert np.isnan(mapped(x))
    assert float(mapped(x[:8] * np.float32(0) + np.float32(2.0**-149))) == 2.0**-149


# ---------------------------------------------------------------- fake_quantize


def there_and_back(x, scale=SCALE):
    return f8j.fake_quantize(x, scale, E4M3)


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
def test_fake_quantize_passes_gradients_straight_through(x, dtype):
    x = jnp.asarray(x, dtype).at[0, 0].set(1e6)  # saturates, and its gradient passes all the same
    weight = jnp.arange(x.size, dtype=jnp.float32).reshape(x.shape).astype(dtype)

    def loss(x, scale):
        return jnp.sum((there_and_back(x, scale) * weight).astype(jnp.float32))

    to_x, to_scale = jax.jit(jax.grad(loss, argnums=(0, 1)))(x, jnp.float32(3))
    assert_same_bits(to_x, weight)
    assert float(to_scale) == 0


def test_fake_quantize_under_every_transformation(x, mesh):
    def loss(x):
        return jnp.sum(there_and_back(x) ** 2, axis=-1)

    value, tangent = jax.jvp(there_and_back, (x,), (2 * x,))
    assert_same_bits(value, f8j.dequantize(f8j.quantize(x, SCALE, E4M3), SCALE, E4M3))
    assert_same_bits(tangent, 2 * x)
    (transposed,) = jax.linear_transpose(jax.linearize(there_and_back, x)[1], x)(x)
    assert_same_bits(transposed, x)
    assert not jax.hessian(lambda x: there_and_back(x).sum())(x[0, :3]).any()
    assert_same_bits(jax.vmap(jax.grad(loss))(x), 2 * value)
    mapped = jax.shard_map(loss, mesh=mesh, in_specs=SHARDED, out_specs=SHARDED)
    assert_same_bits(jax.jit(jax.grad(lambda x: mapped(x).sum()))(x), 2 * value)
