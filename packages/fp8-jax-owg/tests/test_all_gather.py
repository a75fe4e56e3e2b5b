"""Sharded kernels: one byte per element is sent, the bits of gathering first, gradients reduced unrounded."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import fp8_common
import fp8_jax_owg as owg
from fp8_common import Fp8Error
from jax_layers import MATMUL

SCALING = owg.DelayedScaling(amax_history_length=2)
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
    return jnp.asarray(w, dtype), x, owg.init_meta(SCALING) | {"kernel_amax_history": jnp.float32([9, 3])}


def gather_fn(mesh, how, delayed, dim=0):
    """A function (shard or array, meta) -> Fp8Param."""

    def gather(w, meta):
        state = {"scale": meta["kernel_scale"], "amax_history": meta["kernel_amax_history"]} if delayed else {}
        if how == "auto":
            return owg.fp8_all_gather(w, sharding=NamedSharding(mesh, P(*[None] * dim, "fsdp")), **state)
        return owg.fp8_all_gather(w, "fsdp", axis=dim, **state)

    return gather


def on_mesh(step, mesh, how, kernel):
    """Wrap step(w, meta, x) -> (loss, (dw, dmeta)) for the mesh; x is sharded by rows, w as the spec `kernel` says."""
    if how == "auto":
        return step
    specs = {"in_specs": (kernel, P(), P("fsdp")), "out_specs": (P(), (kernel, P()))}
    return jax.shard_map(step, mesh=mesh, **specs, check_vma=how == "checked")


def gathers(compiled):
    """The all-gathers of a program as (dtype, elements), after a check of its collectives."""
    return [
        (one.dtype, one.elements) for one in owg.testing.assert_fp8_collectives(compiled) if one.kind == "all-gather"
    ]


def mean_square(y):
    return (y.astype(jnp.float32) ** 2).sum() / (16 * COLUMNS)


@pytest.mark.matrix(
    "each",
    dim=[0, 1],
    delayed=[True, False],
    way=[("shard_map", False), ("auto", True), ("checked", False), ("shard_map", True), ("auto", False)],
    dtype=["float32", "bfloat16"],
)
def test_kernels_are_sent_as_bytes_and_give_the_bits_of_gathering_first(mesh, way, dim, dtype, delayed):
    (how, remat), kernel = way, P(*[None] * dim, "fsdp")
    w, x, meta = data(dtype)
    gather = gather_fn(mesh, how, delayed, dim)

    def product(w, meta, x, gather=lambda w, meta: w):
        return owg.fp8_dot_general(x, gather(w, meta), MATMUL, meta=meta if delayed else None)

    def step(w, meta, x):
        layer = jax.checkpoint(product, static_argnums=3) if remat else product
        value, grads = jax.value_and_grad(lambda w, m: mean_square(layer(w, m, x, gather)), (0, 1))(w, meta)
        if how == "shard_map":
            grads = grads[0], jax.tree.map(lambda g: jax.lax.pmax(g, "fsdp"), grads[1])
        return value if how == "auto" else jax.lax.psum(value, "fsdp"), grads

    at_w = NamedSharding(mesh, kernel)
    arguments = jax.device_put(w, at_w), meta, jax.device_put(x, NamedSharding(mesh, P("fsdp")))
    shardings = {"out_shardings": (None, (at_w, None))} if how == "auto" else {}
    compiled = jax.jit(on_mesh(step, mesh, how, kernel), **shardings).lower(*arguments).compile()
    assert set(gathers(compiled)) == {("u8", ROWS * COLUMNS)}
    value, (d_w, d_meta) = compiled(*arguments)
    reference = jax.value_and_grad(lambda w, meta: mean_square(product(w, meta, x)), (0, 1))
    wanted, (wanted_w, wanted_meta) = jax.jit(reference)(w, meta)
    np.testing.assert_allclose(value, wanted, rtol=1e-5 if delayed and dtype == "float32" else 1e-2)
    assert d_w.sharding.is_equivalent_to(at_w, 2)
    assert d_w.dtype == dtype
    distance = np.linalg.norm(np.float32(d_w) - np.float32(wanted_w))
    assert distance < (2e-2 if delayed else 1e-1) * np.linalg.norm(np.float32(wanted_w))
    if delayed:
        after = owg.tree.next_state(meta, d_meta)
        np.testing.assert_array_equal(after["kernel_amax_history"], [np.float32(w).max(), 9])
        np.testing.assert_array_equal(d_meta["kernel_scale"], wanted_meta["kernel_scale"])
        assert d_meta["input_amax_history"][0] == np.abs(np.float32(x)).max()


@pytest.mark.parametrize("how", ["shard_map", "auto"])
def test_a_loop_gathers_bytes_forward_and_again_when_it_rematerialises(mesh, how):
    w, x, _ = data("float32")
    kernels, gather, kernel = jnp.stack([w @ w.T] * 3), gather_fn(mesh, how, False), P(None, "fsdp")

    def step(kernels, _, x):
        @jax.checkpoint
        def layer(h, w):
            return jnp.tanh(owg.fp8_dot_general(h, gather(w, None), MATMUL)), None

        value, gradient = jax.value_and_grad(lambda kernels: jax.lax.scan(layer, x, kernels)[0].sum())(kernels)
        return value, (gradient, jnp.float32(0))

    places = (kernels, kernel), (jnp.float32(0), P()), (x, P("fsdp"))
    arguments = [jax.device_put(array, NamedSharding(mesh, at)) for array, at in places]
    compiled = jax.jit(on_mesh(step, mesh, how, kernel)).lower(*arguments).compile()
    assert gathers(compiled) == [("u8", ROWS * ROWS)] * 2
    reduced = [one for one in owg.testing.find_collectives(compiled) if one.kind in ("reduce-scatter", "all-reduce")]
    assert any(one.elements > COLUMNS for one in reduced)


@pytest.mark.matrix("each", how=["shard_map", "auto"], delayed=[True, False])
def test_codes_and_scale_are_those_of_the_definition(mesh, how, delayed):
    w, _, meta = data("float32")
    gather = gather_fn(mesh, how, delayed)
    if how == "shard_map":
        gather = jax.shard_map(gather, mesh=mesh, in_specs=(P("fsdp"), P()), out_specs=P(), check_vma=False)
    found = jax.jit(gather)(jax.device_put(w, NamedSharding(mesh, P("fsdp"))), meta)
    scale = fp8_common.amax_to_scale(np.float32(9) if delayed else np.abs(w).max(), "e4m3")
    np.testing.assert_array_equal(np.asarray(found.data).view(np.uint8), fp8_common.quantize(w, scale, "e4m3"))
    assert found.scale_inv == fp8_common.numerics.reciprocal(scale)


def test_a_wider_gather_and_a_narrow_reduction_are_found():
    program = "%a = f32[64,32]{1,0} all-gather(%p)\n%b = (u8[8], u8[64]) all-gather-start(%q)\n"
    found = [(one.kind, one.bits, one.elements) for one in owg.testing.find_collectives(program)]
    assert found == [("all-gather", 32, 2048), ("all-gather", 8, 64)]
    assert len(owg.testing.assert_fp8_collectives(program, allow_elements=2048)) == 2
    for text, message in (
        (program, "all-gather of 2048 elements in f32"),
        ("", "no all-gather in 8 bits"),
        ("%b = u8[64] all-gather(%q)\n%c = f8e5m2[4] all-reduce(%d)\n", "all-reduce of 4 elements in f8e5m2"),
    ):
        with pytest.raises(Fp8Error, match=message):
            owg.testing.assert_fp8_collectives(text)


def test_bad_arguments_raise(mesh):
    w, x, meta = data("float32")
    sharding, rows = NamedSharding(mesh, P("fsdp")), owg.CurrentScaling(granularity="row")
    kernel = owg.Fp8Param(w.astype(jnp.float8_e4m3fn), jnp.float32(1), w)
    square = owg.Fp8Param(*(leaf[:4, :4] if leaf.ndim else leaf for leaf in kernel))
    for run, message in (
        (lambda: owg.fp8_all_gather(w), "axis_name inside a shard_map, or sharding"),
        (lambda: owg.fp8_all_gather(w, sharding=sharding, scale=meta["kernel_scale"]), "together"),
        (lambda: owg.fp8_all_gather(w, sharding=sharding, scaling=owg.DelayedScaling()), "needs its state"),
        (lambda: owg.fp8_all_gather(w, sharding=sharding, scaling=rows), "one scale per parameter"),
        (lambda: owg.fp8_dot_general(x, kernel, MATMUL, scaling=rows), "A gathered kernel has one scale"),
        (lambda: owg.fp8_einsum("bk,nn->b", x[:, :4], square), "cast already"),
    ):
        with pytest.raises(Fp8Error, match=message):
            run()
    assert owg.fp8_einsum("bk,kn->bn", x, kernel).shape == (16, COLUMNS)
