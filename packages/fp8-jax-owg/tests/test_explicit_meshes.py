"""Meshes with explicit axes: layers run on them with the numbers of one device, the rest names what to do."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, auto_axes
from jax.sharding import PartitionSpec as P

import fp8_jax_owg as owg
from fp8_common import Fp8UnsupportedError
from fp8_jax_owg import CurrentScaling, DelayedScaling, fp8_all_gather, fp8_dot_general, fp8_einsum, fp8_ragged_dot
from fp8_jax_owg import nnx as fp8_nnx
from fp8_jax_owg.pipeline import Schedule, pipeline
from tests.helpers import jax_layers

SCALING = DelayedScaling(amax_history_length=3)
BOTH = nnx.Any(nnx.Param, fp8_nnx.OverwriteWithGradient)
MATMUL = (((1,), (0,)), ((), ()))


@pytest.fixture
def mesh(devices):
    made = jax.make_mesh((2, 2), ("data", "model"), (AxisType.Explicit,) * 2, devices=devices[:4])
    with jax.set_mesh(made):
        yield made


def arrays():
    random = np.random.default_rng(0)
    return np.float32(random.integers(-4, 5, (8, 16))), np.float32(random.integers(-2, 3, (16, 8)))


def gradients(product):
    def loss(x, w, meta):
        y = product(x, w, meta)
        return (y * y).sum() / y.size

    return jax.jit(jax.grad(loss, (0, 1, 2)))


def dot(x, w, meta):
    return fp8_dot_general(x, w, MATMUL, meta=meta, scaling=SCALING)


def turned(x, w, meta):
    return fp8_einsum("bd,de->eb", x, w, meta=meta, scaling=SCALING)


@pytest.mark.parametrize("product", [dot, turned])
@pytest.mark.parametrize(
    ("at_x", "at_w"),
    [(P("data"), P()), (P("data"), P(None, "model")), (P("data"), P("model")), (P(None), P(None, "data"))],
)
def test_products_and_gradients_are_those_of_one_device(mesh, product, at_x, at_w):
    x, w = arrays()
    meta = owg.init_meta(SCALING)
    found = gradients(product)(jax.device_put(x, at_x), jax.device_put(w, at_w), meta)
    wanted = gradients(product)(x, w, meta)  # on every device the same
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(found), jax.device_get(wanted))
    for gradient, at in zip(found, (at_x, at_w), strict=False):
        assert gradient.sharding.spec == P(*at, *[None] * (2 - len(at)))


@pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto])
@pytest.mark.parametrize("form", ["linear", "einsum", "conv"])
def test_layers_of_nnx_take_out_sharding(devices, kind, form):
    layers = {
        "linear": lambda: jax_layers.linear(16, 8, scaling=SCALING, rngs=nnx.Rngs(0)),
        "einsum": lambda: jax_layers.einsum("bsd,de->bse", (16, 8), scaling=SCALING, rngs=nnx.Rngs(0)),
        "conv": lambda: fp8_nnx.convert_to_fp8(nnx.Conv(16, 8, (3,), rngs=nnx.Rngs(0)), scaling=SCALING),
    }
    x = np.float32(np.random.default_rng(0).integers(-4, 5, (8, 4, 16)))

    def step(layer, x, out_sharding):
        y = nnx.jit(lambda layer, x: layer(x, out_sharding=out_sharding))(layer, x)
        loss = lambda layer: (layer(x, out_sharding=out_sharding) ** 2).sum() / x.size  # noqa: E731
        return y, jax.device_get(nnx.to_pure_dict(nnx.jit(fp8_nnx.grad(loss, wrt=BOTH))(layer)))

    wanted, gradients = step(layers[form](), x, None)
    mesh = jax.make_mesh((2, 2), ("data", "model"), (kind,) * 2, devices=devices[:4])
    with jax.set_mesh(mesh):
        at = P("data") if form == "conv" else P("data", None, "model")
        found, sharded = step(layers[form](), jax.device_put(x, at), P("data", None, None))
    assert found.sharding.spec in (P("data", None, None), P("data"))
    np.testing.assert_allclose(jax.device_get(found), wanted, rtol=1e-5)
    # devices hand on parts of gradients of convolutions in bfloat16
    atol = 1e-2 if form == "conv" else 1e-4
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=atol), sharded, gradients)


def refused(what):
    return pytest.raises(Fp8UnsupportedError, match=rf"{what} cannot run on .* explicit mesh axes, got data.*auto_axes")


def stage(w, h, _):
    return h @ w


def test_the_rest_is_refused_with_the_remedy(mesh):
    x, w = (jax.device_put(a, P("data")) for a in arrays())
    with refused("Scales per row"):
        fp8_dot_general(x, w, MATMUL, scaling=CurrentScaling(granularity="row"))
    with refused("fp8_all_gather"):
        fp8_all_gather(w, sharding=w.sharding)
    with refused("fp8_ragged_dot"):
        fp8_ragged_dot(x, jnp.ones((2, 16, 4)), jnp.int32([3, 5]))
    with refused("A pipeline"):
        pipeline(stage, jnp.ones((2, 16, 16)), x[None], Schedule(stages=2, microbatches=1))


def test_the_remedy_helps(mesh):
    x, _ = (jax.device_put(a, P("data")) for a in arrays())

    @auto_axes(out_sharding=P(None, "data"))
    def run(w, x):
        return pipeline(stage, w, x, Schedule(stages=2, microbatches=2))

    y = jax.jit(run)(2 * jnp.stack([jnp.eye(16)] * 2), jnp.stack([x, 3 * x]))
    np.testing.assert_array_equal(y, 4 * np.stack([x, 3 * x]))
