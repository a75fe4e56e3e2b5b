"""Sharded kernels: one byte per element is sent, the bits of gathering first, gradients reduced unrounded."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import fp8_common
from fp8_common import Fp8Error
from fp8_jax_owg import (
    CurrentScaling,
    DelayedScaling,
    Fp8Param,
    assert_fp8_collectives,
    find_collectives,
    fp8_all_gather,
    fp8_dot_general,
    fp8_einsum,
    init_meta,
    next_state,
)

MATMUL = (((1,), (0,)), ((), ()))
SCALING = DelayedScaling(amax_history_length=2)
ROWS, COLUMNS = 64, 32


@pytest.fixture
def mesh(devices):
    """A mesh of eight devices along "fsdp"."""
    return Mesh(np.array(devices), ("fsdp",))


def data(dtype):
    """A kernel whose last shard holds the maximum, inputs and a state whose scales are not 1."""
    random = np.random.default_rng(0)
    w = random.normal(size=(ROWS, COLUMNS)).astype(np.float32)
    w[-1, -1] = 37
    x = jnp.asarray(random.normal(size=(16, ROWS)), dtype)
    meta = init_meta(SCALING) | {"kernel_amax_history": jnp.float32([9, 3])}
    return jnp.asarray(w, dtype), x, meta


def state(meta, delayed):
    return {"scale": meta["kernel_scale"], "amax_history": meta["kernel_amax_history"]} if delayed else {}


def gather_fn(mesh, how, delayed, dim=0):
    """A function (shard or array, meta) -> Fp8Param."""
    if how == "shard_map":
        return lambda w, meta: fp8_all_gather(w, "fsdp", axis=dim, **state(meta, delayed))
    sharding = NamedSharding(mesh, PartitionSpec(*[None] * dim, "fsdp"))
    return lambda w, meta: fp8_all_gather(w, sharding=sharding, **state(meta, delayed))


def on_mesh(f, mesh, how, dim, check_vma=True):
    """Wrap (w, meta, x) -> (loss, (dw, dmeta)) for the mesh; x is sharded by rows, w along `dim`."""
    kernel, rows = PartitionSpec(*[None] * dim, "fsdp"), PartitionSpec("fsdp")
    if how == "auto":
        return f, NamedSharding(mesh, kernel), NamedSharding(mesh, rows)
    mapped = jax.shard_map(
        f,
        mesh=mesh,
        in_specs=(kernel, PartitionSpec(), rows),
        out_specs=(PartitionSpec(), (kernel, PartitionSpec())),
        check_vma=check_vma,
    )
    return mapped, NamedSharding(mesh, kernel), NamedSharding(mesh, rows)


def training_step(mesh, how, delayed, dim, remat):
    """Value and gradients of a loss whose kernel is gathered, and rematerialised with the product."""
    gather = gather_fn(mesh, how, delayed, dim)

    def layer(w, meta, x):
        return fp8_dot_general(x, gather(w, meta), MATMUL, meta=meta if delayed else None)

    layer = jax.checkpoint(layer) if remat else layer

    def step(w, meta, x):
        def loss(w, meta):
            y = layer(w, meta, x).astype(jnp.float32) ** 2
            return y.sum() / (16 * COLUMNS)

        value, grads = jax.value_and_grad(loss, (0, 1))(w, meta)
        if how == "shard_map":
            value = jax.lax.psum(value, "fsdp")
            grads = grads[0], jax.tree.map(lambda g: jax.lax.pmax(g, "fsdp"), grads[1])
        return value, grads

    return step


@pytest.mark.matrix(
    "each",
    dim=[0, 1],
    delayed=[True, False],
    way=[("shard_map", False), ("auto", True), ("shard_map", True), ("auto", False)],
    dtype=["float32", "bfloat16"],
)
def test_kernels_travel_as_bytes_and_give_the_bits_of_gathering_first(mesh, way, dim, dtype, delayed):
    how, remat = way
    w, x, meta = data(dtype)
    step, at_w, at_x = on_mesh(training_step(mesh, how, delayed, dim, remat), mesh, how, dim, check_vma=False)
    arguments = jax.device_put(w, at_w), meta, jax.device_put(x, at_x)
    shardings = {} if how == "shard_map" else {"out_shardings": (None, (at_w, None))}
    compiled = jax.jit(step, **shardings).lower(*arguments).compile()
    found = assert_fp8_collectives(compiled)
    gathers = [one for one in found if one.kind == "all-gather"]
    assert {(one.dtype, one.elements) for one in gathers} == {("u8", ROWS * COLUMNS)}
    assert gathers
    value, (d_w, d_meta) = compiled(*arguments)

    def reference(w, meta):
        y = fp8_dot_general(x, w, MATMUL, meta=meta if delayed else None)
        return (y.astype(jnp.float32) ** 2).sum() / (16 * COLUMNS)

    wanted, (wanted_w, wanted_meta) = jax.value_and_grad(reference, (0, 1))(w, meta)
    np.testing.assert_allclose(value, wanted, rtol=1e-5 if delayed and dtype == "float32" else 1e-2)
    assert d_w.sharding.is_equivalent_to(at_w, 2)
    assert d_w.dtype == dtype
    distance = np.linalg.norm(np.float32(d_w) - np.float32(wanted_w))
    assert distance < (2e-2 if delayed else 1e-1) * np.linalg.norm(np.float32(wanted_w))
    if delayed:
        after = next_state(meta, d_meta)
        np.testing.assert_array_equal(after["kernel_amax_history"], [np.float32(w).max(), 9])
        np.testing.assert_array_equal(d_meta["kernel_scale"], wanted_meta["kernel_scale"])
        assert d_meta["input_amax_history"][0] == np.abs(np.float32(x)).max()


@pytest.mark.parametrize("how", ["shard_map", "auto"])
def test_a_loop_gathers_bytes_forward_and_again_when_it_rematerialises(mesh, how):
    w, x, _ = data("float32")
    kernels = jnp.stack([w[:, :COLUMNS] @ w.T[:COLUMNS]] * 3)
    gather = gather_fn(mesh, how, False)

    def step(kernels, _, x):
        def loss(kernels):
            @jax.checkpoint
            def layer(h, w):
                return jnp.tanh(fp8_dot_general(h, gather(w, None), MATMUL)), None

            return jax.lax.scan(layer, x, kernels)[0].sum()

        value, gradient = jax.value_and_grad(loss)(kernels)
        return value, (gradient, jnp.float32(0))

    kernel, rows = PartitionSpec(None, "fsdp"), PartitionSpec("fsdp")
    if how == "shard_map":
        specs = (kernel, PartitionSpec(), rows)
        out = (PartitionSpec(), (kernel, PartitionSpec()))
        step = jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=out, check_vma=False)
    arguments = (
        jax.device_put(kernels, NamedSharding(mesh, kernel)),
        jnp.float32(0),
        jax.device_put(x, NamedSharding(mesh, rows)),
    )
    found = assert_fp8_collectives(jax.jit(step).lower(*arguments).compile())
    gathers = [one for one in found if one.kind == "all-gather"]
    assert [(one.dtype, one.elements) for one in gathers] == [("u8", ROWS * ROWS)] * 2
    assert any(one.kind in ("reduce-scatter", "all-reduce") and one.elements > COLUMNS for one in found)


@pytest.mark.parametrize("delayed", [True, False])
@pytest.mark.parametrize("how", ["shard_map", "auto"])
def test_codes_and_scale_are_those_of_the_definition(mesh, how, delayed):
    w, _, meta = data("float32")
    gather = gather_fn(mesh, how, delayed)
    if how == "shard_map":
        spec = PartitionSpec("fsdp"), PartitionSpec()
        gather = jax.shard_map(gather, mesh=mesh, in_specs=spec, out_specs=PartitionSpec(), check_vma=False)
    found = jax.jit(gather)(jax.device_put(w, NamedSharding(mesh, PartitionSpec("fsdp"))), meta)
    scale = fp8_common.amax_to_scale(np.float32(9) if delayed else np.abs(w).max(), "e4m3")
    np.testing.assert_array_equal(np.asarray(found.data).view(np.uint8), fp8_common.quantize(w, scale, "e4m3"))
    assert found.scale_inv == fp8_common.reciprocal(scale)


def test_shard_map_with_checked_axes_gives_the_same(mesh):
    w, x, meta = data("float32")

    def step(w, meta, x):
        def loss(w, meta):
            y = fp8_dot_general(x, fp8_all_gather(w, "fsdp", **state(meta, True)), MATMUL, meta=meta)
            return (y**2).sum()

        return jax.grad(loss, (0, 1))(w, meta)

    specs = (PartitionSpec("fsdp"), PartitionSpec(), PartitionSpec("fsdp"))
    run = jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=specs[:2], check_vma=True)
    d_w, d_meta = jax.jit(run)(w, meta, x)
    assert np.isfinite(d_w).all()
    assert d_meta["kernel_amax_history"][0] == 37
    assert d_meta["input_amax_history"][0] == np.abs(x).max()


def test_a_wider_gather_and_a_narrow_reduction_are_found():
    program = "%a = f32[64,32]{1,0} all-gather(%p)\n%b = (u8[8], u8[64]) all-gather-start(%q)\n"
    assert [(one.kind, one.bits, one.elements) for one in find_collectives(program)] == [
        ("all-gather", 32, 2048),
        ("all-gather", 8, 64),
    ]
    with pytest.raises(Fp8Error, match="all-gather of 2048 elements in f32"):
        assert_fp8_collectives(program)
    assert len(assert_fp8_collectives(program, allow_elements=2048)) == 2
    with pytest.raises(Fp8Error, match="no all-gather in 8 bits"):
        assert_fp8_collectives("")
    with pytest.raises(Fp8Error, match="all-reduce of 4 elements in f8e5m2"):
        assert_fp8_collectives("%b = u8[64] all-gather(%q)\n%c = f8e5m2[4] all-reduce(%d)\n")


def test_bad_arguments_are_refused(mesh):
    w, x, meta = data("float32")
    sharding = NamedSharding(mesh, PartitionSpec("fsdp"))
    with pytest.raises(Fp8Error, match="axis_name inside a shard_map, or sharding"):
        fp8_all_gather(w)
    with pytest.raises(Fp8Error, match="together"):
        fp8_all_gather(w, sharding=sharding, scale=meta["kernel_scale"])
    with pytest.raises(Fp8Error, match="needs its state"):
        fp8_all_gather(w, sharding=sharding, scaling=DelayedScaling())
    with pytest.raises(Fp8Error, match="one scale per parameter"):
        fp8_all_gather(w, sharding=sharding, scaling=CurrentScaling(granularity="row"))
    kernel = Fp8Param(w.astype(jnp.float8_e4m3fn), jnp.float32(1), w)
    with pytest.raises(Fp8Error, match="A gathered kernel has one scale"):
        fp8_dot_general(x, kernel, MATMUL, scaling=CurrentScaling(granularity="row"))
    with pytest.raises(Fp8Error, match="cast already"):
        fp8_einsum("bk,nn->b", x[:, :4], Fp8Param(*(leaf[:4, :4] if leaf.ndim else leaf for leaf in kernel)))
    assert fp8_einsum("bk,kn->bn", x, kernel).shape == (16, COLUMNS)
