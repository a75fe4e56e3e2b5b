"""Meshes with explicit axes: layers run on them with the numbers of one device, the rest names what to do."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, auto_axes
from jax.sharding import PartitionSpec as P

import fp8_jax_owg as owg
from fp8_common import Fp8UnsupportedError
from fp8_jax_owg import CurrentScaling, DelayedScaling, fp8_all_gather, fp8_dot_general, fp8_einsum, fp8_ragged_dot
from fp8_jax_owg.pipeline import Schedule, pipeline

SCALING = DelayedScaling(amax_history_length=3)
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
