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
SCALE, SQUARE = np.float32(3), (128, 128)
# a function, its definition, and the operation that stands for it in programs where there is a GPU, if one does
OPERATIONS = {
    "amax": (f8j.amax, f8.amax, "fp8_amax_key"),
    "amax, kept": (lambda x: f8j.amax(x, keepdims=True), lambda x: f8.amax(x, keepdims=True), "fp8_amax_key"),
    "amax of rows": (lambda x: f8j.amax(x, axis=-1), lambda x: f8.amax(x, axis=-1), None),
    "quantize": (lambda x: f8j.quantize(x, SCALE, "e4m3"), lambda x: f8.quantize(x, SCALE, "e4m3"), "fp8_quantize"),
    "a scale per row": (
        lambda x: f8j.quantize(x, np.ones((8, 1), np.float32), "e4m3"),
        lambda x: f8.quantize(x, np.float32(1), "e4m3"),
        None,
    ),
    "cast": (lambda x: casts.cast(x, SCALE, f8.E5M2), lambda x: f8.quantize(x, SCALE, "e5m2"), "fp8_quantize"),
    "with amax": (
        lambda x: casts.cast_with_amax(x, SCALE, f8.E4M3),
        lambda x: (f8.quantize(x, SCALE, "e4m3"), f8.amax(x)),
        "fp8_quantize",
    ),
    "rowwise": (lambda x: f8j.quantize_rowwise(x, "e4m3"), lambda x: f8.quantize_rowwise(x, "e4m3"), "fp8_rowwise"),
    "columns": (lambda x: f8j.quantize_rowwise(x, "e4m3", 0), lambda x: f8.quantize_rowwise(x, "e4m3", 0), None),
    "slices": (
        lambda x: casts.cast_slices(x, f8.E4M3, (0,), f8.CANONICAL),
        lambda x: f8.quantize_rowwise(x, "e4m3", 0),
        None,
    ),
    "1x128": (lambda x: f8j.quantize_blockwise(x, "e4m3"), lambda x: f8.quantize_blockwise(x, "e4m3"), "fp8_blocks"),
    "128x128": (
        lambda x: f8j.quantize_blockwise(x, "e5m2", SQUARE),
        lambda x: f8.quantize_blockwise(x, "e5m2", SQUARE),
        "fp8_blocks",
    ),
    "other blocks": (
        lambda x: f8j.quantize_blockwise(x, "e4m3", (1, 64)),
        lambda x: f8.quantize_blockwise(x, "e4m3", (1, 64)),
        None,
    ),
    "mx": (lambda x: f8j.quantize_mx(x, "e4m3"), lambda x: f8.quantize_mx(x, "e4m3"), "fp8_mx"),
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
@pytest.mark.matrix("each", name=list(OPERATIONS), dtype=[np.float32, ml_dtypes.bfloat16, np.float16])
def test_operations_equal_numpy_and_have_no_gradient(name, dtype):
    operation, definition, _ = OPERATIONS[name]
    x = jnp.asarray(X.astype(dtype))
    assert_equal(operation(x), definition(X.astype(dtype)))
    assert_equal(jax.jit(operation)(x), definition(X.astype(dtype)))
    total = jax.grad(lambda x: sum(jnp.sum(leaf.astype(jnp.float32)) for leaf in jax.tree.leaves(operation(x))))
    assert not np.asarray(total(x)).any()


@pytest.mark.usefixtures("selected")
@pytest.mark.matrix("each", name=list(OPERATIONS), axis=[0, 1, 2])
def test_vmap_equals_a_loop(name, axis):
    operation, definition, _ = OPERATIONS[name]
    stacked = jnp.stack([jnp.asarray(X), 2 * jnp.asarray(X), -jnp.asarray(X[::-1])], axis=axis)
    results = [definition(np.asarray(x)) for x in jnp.moveaxis(stacked, axis, 0)]
    wanted = tuple(map(np.stack, zip(*results, strict=True))) if isinstance(results[0], tuple) else np.stack(results)
    assert_equal(jax.jit(jax.vmap(operation, in_axes=axis))(stacked), wanted)


@pytest.mark.parametrize("name", sorted(OPERATIONS.keys() - {"cast", "with amax", "slices"}))
def test_public_functions_take_the_operations_where_there_is_a_gpu(name, monkeypatch):
    function, _, primitive = OPERATIONS[name]

    def traced():
        return str(jax.make_jaxpr(lambda x: function(x))(jnp.asarray(X)))

    monkeypatch.setattr(kernels, "_obstacle", lambda: "this JAX sees no NVIDIA GPU")
    assert "fp8_" not in traced()
    monkeypatch.setattr(kernels, "_obstacle", lambda: None)
    names = {one for _, _, one in OPERATIONS.values() if one}
    assert [one for one in names if one in traced()] == ([primitive] if primitive else [])
    monkeypatch.setenv("FP8_COMMON_BACKEND", "reference")
    assert "fp8_" not in traced()


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
