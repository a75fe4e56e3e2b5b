"""Operations with kernels, where there is no GPU: the reference's bits, under jit, vmap, grad and sharding."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import fp8_common as f8
from fp8_common import jax as f8j
from fp8_common.jax import _kernels as kernels
from fp8_common.jax import casts, compat
from fp8_common.testing import assert_same_bits

X = np.random.default_rng(7).normal(size=(8, 256)).astype(np.float32)
SCALE = np.float32(3)

OPERATIONS = {
    "amax": (f8j.amax, f8.amax),
    "quantize": (lambda x: f8j.quantize(x, SCALE, "e4m3"), lambda x: f8.quantize(x, SCALE, "e4m3")),
    "cast": (lambda x: casts.cast(x, SCALE, f8.E5M2), lambda x: f8.quantize(x, SCALE, "e5m2")),
    "with amax": (
        lambda x: casts.cast_with_amax(x, SCALE, f8.E4M3),
        lambda x: (f8.quantize(x, SCALE, "e4m3"), f8.amax(x)),
    ),
    "rowwise": (lambda x: f8j.quantize_rowwise(x, "e4m3"), lambda x: f8.quantize_rowwise(x, "e4m3")),
    "slices": (
        lambda x: casts.cast_slices(x, f8.E4M3, (0,), f8.CANONICAL),
        lambda x: f8.quantize_rowwise(x, "e4m3", axis=0),
    ),
    "1x128": (lambda x: f8j.quantize_blockwise(x, "e4m3"), lambda x: f8.quantize_blockwise(x, "e4m3")),
    "128x128": (
        lambda x: f8j.quantize_blockwise(x, "e4m3", (128, 128)),
        lambda x: f8.quantize_blockwise(x, "e4m3", (128, 128)),
    ),
    "mx": (lambda x: f8j.quantize_mx(x, "e4m3"), lambda x: f8.quantize_mx(x, "e4m3")),
}


@pytest.fixture
def selected(monkeypatch):
    """Programs hold the operations, as where there is a GPU; on a CPU these lower to their references."""
    monkeypatch.setattr(kernels, "_obstacle", lambda: None)


def assert_equal(got, want):
    wanted = want if isinstance(want, tuple) else (want,)
    for g, w in zip(jax.tree.leaves(got), wanted, strict=True):
        codes = np.asarray(w).dtype == np.uint8
        assert_same_bits(np.asarray(g).view(np.uint8) if codes else np.asarray(g), np.asarray(w))


@pytest.mark.usefixtures("selected")
@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.float16])
def test_operations_equal_numpy(name, dtype):
    operation, definition = OPERATIONS[name]
    x = X.astype(dtype)
    assert_equal(operation(jnp.asarray(x)), definition(x))
    assert_equal(jax.jit(operation)(jnp.asarray(x)), definition(x))


@pytest.mark.usefixtures("selected")
@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_vmap_equals_a_loop(name, axis):
    operation, definition = OPERATIONS[name]
    stacked = jnp.stack([jnp.asarray(X), 2 * jnp.asarray(X), -jnp.asarray(X[::-1])], axis=axis)
    results = [definition(np.asarray(x)) for x in jnp.moveaxis(stacked, axis, 0)]
    wanted = tuple(map(np.stack, zip(*results, strict=True))) if isinstance(results[0], tuple) else np.stack(results)
    assert_equal(jax.jit(jax.vmap(operation, in_axes=axis))(stacked), wanted)


@pytest.mark.usefixtures("selected")
@pytest.mark.parametrize("name", OPERATIONS)
def test_gradients_are_zero(name):
    operation, _ = OPERATIONS[name]

    def total(x):
        return sum(jnp.sum(leaf.astype(jnp.float32)) for leaf in jax.tree.leaves(operation(x)))

    assert not np.asarray(jax.grad(total)(jnp.asarray(X))).any()


NAMES = ("fp8_amax_key", "fp8_quantize", "fp8_rowwise", "fp8_blocks", "fp8_mx")


def primitives(traced):
    return {name for name in NAMES if name in traced}


PUBLIC = {
    "amax": (lambda x: f8j.amax(x), {"fp8_amax_key"}),
    "amax, kept": (lambda x: f8j.amax(x, keepdims=True), {"fp8_amax_key"}),
    "amax of rows": (lambda x: f8j.amax(x, axis=-1), set()),
    "quantize": (lambda x: f8j.quantize(x, SCALE, "e4m3"), {"fp8_quantize"}),
    "a scale per row": (lambda x: f8j.quantize(x, np.ones((8, 1), np.float32), "e4m3"), set()),
    "rowwise": (lambda x: f8j.quantize_rowwise(x, "e4m3"), {"fp8_rowwise"}),
    "columns": (lambda x: f8j.quantize_rowwise(x, "e4m3", axis=0), set()),
    "1x128": (lambda x: f8j.quantize_blockwise(x, "e4m3"), {"fp8_blocks"}),
    "128x128": (lambda x: f8j.quantize_blockwise(x, "e5m2", (128, 128)), {"fp8_blocks"}),
    "other blocks": (lambda x: f8j.quantize_blockwise(x, "e4m3", (1, 64)), set()),
    "mx": (lambda x: f8j.quantize_mx(x, "e4m3"), {"fp8_mx"}),
    "fake": (lambda x: f8j.fake_quantize(x, SCALE, "e4m3"), {"fp8_quantize"}),
}


@pytest.mark.parametrize("name", PUBLIC)
def test_public_functions_take_the_operations_where_there_is_a_gpu(name, monkeypatch):
    function, expected = PUBLIC[name]
    x = jnp.asarray(X)
    monkeypatch.setattr(kernels, "_obstacle", lambda: "this JAX sees no NVIDIA GPU")
    plain, traced = jax.jit(function)(x), str(jax.make_jaxpr(function)(x))
    assert "fp8_" not in traced
    monkeypatch.setattr(kernels, "_obstacle", lambda: None)
    traced = str(jax.make_jaxpr(lambda x: function(x))(x))
    assert primitives(traced) == expected
    for got, want in zip(jax.tree.leaves(function(x)), jax.tree.leaves(plain), strict=True):
        assert (got.shape, got.dtype) == (want.shape, want.dtype)
        assert_same_bits(np.asarray(got), np.asarray(want))
    monkeypatch.setenv("FP8_COMMON_BACKEND", "reference")
    assert "fp8_" not in str(jax.make_jaxpr(lambda x: function(x))(x))


def test_the_choice_says_why_kernels_cannot_run(monkeypatch):
    monkeypatch.setattr(kernels, "_obstacle", lambda: "this JAX sees no NVIDIA GPU")
    monkeypatch.setenv("FP8_COMMON_BACKEND", "triton")
    with pytest.raises(f8.Fp8UnsupportedError, match="FP8_COMMON_BACKEND=triton, but this JAX sees no NVIDIA GPU"):
        f8j.amax(X)


@pytest.mark.usefixtures("selected")
def test_an_operation_is_compiled_once_outside_of_jit():
    f8j.quantize_mx(jnp.asarray(X), "e5m2")
    kept = kernels._jitted.cache_info().currsize
    f8j.quantize_mx(jnp.asarray(2 * X), "e5m2")
    assert kernels._jitted.cache_info().currsize == kept


def test_only_arrays_of_one_device_are_local():
    """What the partitioner spreads over devices is left to XLA."""

    class Context:
        def __init__(self, **attributes):
            self.__dict__.update(attributes)

    mesh = jax.sharding.AbstractMesh((2, 4), ("a", "b"))
    assert compat.is_local(Context(num_devices=1))
    assert not compat.is_local(Context(num_devices=8))
    assert compat.is_local(Context(mesh=mesh, manual_axes=frozenset("ab")))
    assert not compat.is_local(Context(mesh=mesh, manual_axes=frozenset("a")))
