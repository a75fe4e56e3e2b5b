"""Products inside `shard_map`, on explicit meshes: the gradients and the state of one device."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, auto_axes
from jax.sharding import PartitionSpec as P

import fp8_jax_owg as owg
import jax_layers
from fp8_common import Fp8UnsupportedError
from fp8_jax_owg import CurrentScaling
from fp8_jax_owg import nnx as owg_nnx
from fp8_jax_owg.pipeline import Schedule, pipeline
from jax_layers import BOTH, MATMUL, SCALING, T, casts, convolution, dot, meta_of, ragged, transposed

# powers of two, so that casts of small integers are exact whatever the local amax is
SCALINGS = {
    "delayed": SCALING,
    "tensor": CurrentScaling(power_of_2=True),
    "row": CurrentScaling(granularity="row", power_of_2=True),
}


def integers(*shape, seed=0):
    """Integers, so that sums are exact in any order; every row reaches the same amax."""
    x = np.random.default_rng(seed).integers(-4, 5, shape).astype(np.float32)
    x[..., 0] = 4
    return x


def assert_same(found, wanted):
    T(np.testing.assert_array_equal, jax.device_get(found), jax.device_get(wanted))


CASES = [
    (dot, "delayed", True),
    (dot, "delayed", False),
    (dot, "row", True),
    (ragged, "delayed", True),
    (convolution, "tensor", True),
    (casts, "delayed", True),
]


@pytest.mark.parametrize(("product", "name", "inside"), CASES)
def test_a_replicated_kernel_and_a_sharded_batch(devices, product, name, inside):
    """With the default `check_vma=True`, the gradient taken inside of the `shard_map` or outside."""
    # without entries in its history a state keeps its scale, 1: products of integers are exact
    meta, x, w = meta_of(SCALINGS[name]), integers(8, 16), integers(16, 8, seed=1)

    def loss(w, meta, x):
        # times integers, so that the gradients that are cast differ from device to device
        return (product(x, w, meta, SCALINGS[name]) * x[:, :8]).sum()

    def local(w, meta, x):
        value, gradients = jax.value_and_grad(loss, (0, 1))(w, meta, x) if inside else (loss(w, meta, x), None)
        return jax.lax.psum(value, "a"), gradients

    run = jax.shard_map(
        local, mesh=jax_layers.mesh(4), in_specs=(P(), P(), P("a")), out_specs=(P(), (P(), P()) if inside else None)
    )
    if not inside:
        run = jax.value_and_grad(lambda *a, run=run: run(*a)[0], (0, 1))
    assert_same(jax.jit(run)(w, meta, x), jax.jit(jax.value_and_grad(loss, (0, 1)))(w, meta, x))


def test_a_gathered_kernel_keeps_its_place(devices):
    x, w = integers(8, 16), integers(16, 8, seed=1)

    def local(w, x):
        gathered = owg.fp8_all_gather(w, "a", scaling=SCALINGS["tensor"])
        value, gradient = jax.value_and_grad(
            lambda g: owg.fp8_dot_general(x, g, MATMUL, scaling=SCALINGS["tensor"]).sum(), allow_int=True
        )(gathered)
        return jax.lax.psum(value, "a"), jax.lax.psum_scatter(gradient.gradient, "a", tiled=True)

    run = jax.shard_map(local, mesh=jax_layers.mesh(4), in_specs=(P("a"), P("a")), out_specs=(P(), P("a")))
    assert_same(jax.jit(run)(w, x), jax.value_and_grad(lambda w: (x @ w).sum())(jnp.asarray(w)))


# ---------------------------------------------------------------- explicit meshes


@pytest.fixture
def explicit(devices):
    with jax.set_mesh(jax_layers.mesh(2, 2, kind=AxisType.Explicit)):
        yield


def gradients(product):
    def loss(x, w, meta):
        y = product(x, w, meta, SCALING)
        return (y * y).sum() / y.size

    return jax.jit(jax.grad(loss, (0, 1, 2)))


PLACES = [(P("a"), P()), (P("a"), P(None, "b")), (P("a"), P("b")), (P(None), P(None, "a"))]


@pytest.mark.matrix("each", product=[dot, transposed], places=PLACES)
def test_matmuls_on_explicit_meshes_are_those_of_one_device(explicit, product, places):
    x, w, meta = integers(8, 16), integers(16, 8, seed=1) / 2, owg.init_meta(SCALING)
    found = gradients(product)(*map(jax.device_put, (x, w), places), meta)
    assert_same(found, gradients(product)(x, w, meta))  # on every device the same
    for gradient, at in zip(found, places, strict=False):
        assert gradient.sharding.spec == P(*at, *[None] * (2 - len(at)))


LAYERS = {
    "linear": lambda: jax_layers.linear(16, 8, scaling=SCALING, rngs=nnx.Rngs(0)),
    "einsum": lambda: jax_layers.einsum("bsd,de->bse", (16, 8), scaling=SCALING, rngs=nnx.Rngs(0)),
    "conv": lambda: owg_nnx.convert_to_fp8(nnx.Conv(16, 8, (3,), rngs=nnx.Rngs(0)), scaling=SCALING),
}


@pytest.mark.matrix("each", form=list(LAYERS), kind=[AxisType.Explicit, AxisType.Auto])
def test_layers_of_nnx_take_out_sharding(devices, form, kind):
    x = integers(8, 4, 16)

    @nnx.jit(static_argnums=2)
    def step(layer, x, out_sharding):
        def loss(layer):
            y = layer(x, out_sharding=out_sharding)
            return (y**2).sum() / x.size, y

        gradients, y = owg_nnx.grad(loss, has_aux=True, wrt=BOTH)(layer)
        return nnx.to_pure_dict(gradients), y

    wanted = jax.device_get(step(LAYERS[form](), x, None))
    with jax.set_mesh(jax_layers.mesh(2, 2, kind=kind)):
        at = P("a") if form == "conv" else P("a", None, "b")
        found = step(LAYERS[form](), jax.device_put(x, at), P("a", None, None))
    assert found[1].sharding.spec in (P("a", None, None), P("a"))
    # devices hand on parts of gradients of convolutions in bfloat16
    close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-2 if form == "conv" else 1e-4)
    T(close, jax.device_get(found), wanted)


def stage(w, h, _):
    return h @ w


REFUSED = {
    "Scales per row": lambda x, w: dot(x, w, None, CurrentScaling(granularity="row")),
    "fp8_all_gather": lambda x, w: owg.fp8_all_gather(w, sharding=w.sharding),
    "fp8_ragged_dot": lambda x, w: owg.fp8_ragged_dot(x, jnp.ones((2, 16, 4)), jnp.int32([3, 5])),
    "A pipeline": lambda x, w: pipeline(stage, jnp.ones((2, 16, 16)), x[None], Schedule(stages=2, microbatches=1)),
}


@pytest.mark.parametrize("what", REFUSED)
def test_the_rest_raises_on_explicit_meshes_with_the_remedy(explicit, what):
    x, w = (jax.device_put(a, P("a")) for a in (integers(8, 16), integers(16, 8)))
    with pytest.raises(Fp8UnsupportedError, match=rf"{what} cannot run on .* explicit mesh axes, got a.*auto_axes"):
        REFUSED[what](x, w)


def test_the_remedy_helps(explicit):
    x = jax.device_put(integers(8, 16), P("a"))

    @auto_axes(out_sharding=P(None, "a"))
    def run(w, x):
        return pipeline(stage, w, x, Schedule(stages=2, microbatches=2))

    y = jax.jit(run)(2 * jnp.stack([jnp.eye(16)] * 2), jnp.stack([x, 3 * x]))
    np.testing.assert_array_equal(y, 4 * np.stack([x, 3 * x]))
