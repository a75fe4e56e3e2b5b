"""Layers inside `shard_map` with the default `check_vma=True`: the gradients and the state of one device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import fp8_jax_owg as owg
from fp8_jax_owg import CurrentScaling, DelayedScaling

SCALING = DelayedScaling(amax_history_length=3)
MATMUL = (((1,), (0,)), ((), ()))
# powers of two, so that casts of small integers are exact whatever the local amax is
SCALINGS = {
    "delayed": SCALING,
    "tensor": CurrentScaling(power_of_2=True),
    "row": CurrentScaling(granularity="row", power_of_2=True),
}


@pytest.fixture
def mesh(devices):
    return jax.make_mesh((4,), ("data",), (jax.sharding.AxisType.Auto,), devices=devices[:4])


def integers(*shape, seed=0):
    """Integers, so that sums are exact in any order; every row reaches the same amax."""
    x = np.random.default_rng(seed).integers(-4, 5, shape).astype(np.float32)
    x[..., 0] = 4
    return jnp.asarray(x)


def dense(x, w, meta, scaling):
    return owg.fp8_dot_general(x, w, MATMUL, meta=meta, scaling=scaling)


def einsum(x, w, meta, scaling):
    return owg.fp8_einsum("bi,io->ob", x, w, meta=meta, scaling=scaling).T


def ragged(x, w, meta, scaling):
    sizes = jnp.full((1,), x.shape[0], jnp.int32)
    return owg.fp8_ragged_dot(x, w[None], sizes, meta=meta, scaling=scaling)


def convolution(x, w, meta, scaling):
    meta = meta and {name: leaf for name, leaf in meta.items() if not name.startswith("output_grad")}
    dims = ("NWC", "WIO", "NWC")
    y = owg.fp8_conv_general_dilated(
        x[:, None], w[None], (1,), "SAME", dimension_numbers=dims, meta=meta, scaling=scaling
    )
    return y[:, 0]


def casts(x, w, meta, scaling):
    y = owg.in_qdq(x, meta["input_scale"], meta["input_amax_history"], scaling) @ w
    return owg.out_qdq(y, meta["output_grad_scale"], meta["output_grad_amax_history"], scaling)


CASES = [
    *((dense, name) for name in SCALINGS),
    (einsum, "delayed"),
    (ragged, "delayed"),
    (convolution, "tensor"),
    (casts, "delayed"),
]


@pytest.mark.parametrize(("product", "name"), CASES, ids=lambda one: getattr(one, "__name__", one))
def test_a_replicated_kernel_and_a_sharded_batch(mesh, product, name):
    scaling = SCALINGS[name]
    # without entries in its history a state keeps its scale, 1: products of integers are exact
    meta = owg.init_meta(scaling) if name == "delayed" else None
    x, w = integers(8, 16), integers(16, 8, seed=1)

    def loss(w, meta, x):
        # times integers, so that the gradients that are cast differ from device to device
        return (product(x, w, meta, scaling) * x[:, :8]).sum()

    def local(w, meta, x):
        value, gradients = jax.value_and_grad(loss, (0, 1))(w, meta, x)
        return jax.lax.psum(value, "data"), gradients

    inside = jax.shard_map(local, mesh=mesh, in_specs=(P(), P(), P("data")), out_specs=(P(), (P(), P())))
    found = jax.jit(inside)(w, meta, x)
    wanted = jax.value_and_grad(loss, (0, 1))(w, meta, x)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(found), jax.device_get(wanted))


@pytest.mark.parametrize("name", ["delayed", "row"])
def test_the_gradient_may_be_taken_outside(mesh, name):
    scaling = SCALINGS[name]
    meta = owg.init_meta(scaling) if name == "delayed" else None
    x, w = integers(8, 16), integers(16, 8, seed=1)

    def local(w, meta, x):
        return jax.lax.psum((dense(x, w, meta, scaling) * x[:, :8]).sum(), "data")

    def loss(w, meta, x):
        return jax.shard_map(local, mesh=mesh, in_specs=(P(), P(), P("data")), out_specs=P())(w, meta, x)

    found = jax.jit(jax.grad(loss, (0, 1)))(w, meta, x)
    wanted = jax.grad(lambda w, meta: (dense(x, w, meta, scaling) * x[:, :8]).sum(), (0, 1))(w, meta)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(found), jax.device_get(wanted))


def test_a_gathered_kernel_keeps_its_place(mesh):
    x, w = integers(8, 16), integers(16, 8, seed=1)

    def local(w, x):
        gathered = owg.fp8_all_gather(w, "data", scaling=SCALINGS["tensor"])
        value, gradient = jax.value_and_grad(
            lambda g: owg.fp8_dot_general(x, g, MATMUL, scaling=SCALINGS["tensor"]).sum(), allow_int=True
        )(gathered)
        return jax.lax.psum(value, "data"), jax.lax.psum_scatter(gradient.gradient, "data", tiled=True)

    value, gradient = jax.jit(
        jax.shard_map(local, mesh=mesh, in_specs=(P("data"), P("data")), out_specs=(P(), P("data")))
    )(w, x)
    wanted = jax.value_and_grad(lambda w: (x @ w).sum())(w)
    np.testing.assert_array_equal(value, wanted[0])
    np.testing.assert_array_equal(gradient, wanted[1])


def test_a_cast_of_gradients_takes_a_state_of_its_own_on_each_device(mesh):
    def loss(y, scale, history):
        return (
            owg.out_qdq(y, scale[0], history[0], SCALING) * (1 + jax.lax.axis_index("data").astype(jnp.float32))
        ).sum()

    def on_shard(y, scale, history):
        g, _, seen = owg.grad(loss, argnums=(0, 1, 2))(y, scale, history)
        return g[None], seen

    spec = P("data")
    run = jax.shard_map(on_shard, mesh=mesh, in_specs=(P(), spec, spec), out_specs=(P(), spec))
    state = jnp.ones((4, 1)), jnp.zeros((4, 3))
    g, history = jax.jit(run)(jnp.ones(8), *state)
    # the gradient of what is replicated is the sum over devices
    np.testing.assert_array_equal(g[0], np.full(8, 10))
    assert history.shape == (4, 3)
