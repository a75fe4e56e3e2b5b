"""Experts on the devices of a mesh axis: states of their own, the numbers of one device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import fp8_jax_owg as owg
from fp8_jax_owg import DelayedScaling

EXPERTS, CAPACITY, FEATURES, HIDDEN = 4, 3, 16, 8
SCALING = DelayedScaling(amax_history_length=3)


@pytest.fixture
def mesh(devices):
    """Two devices hold copies of each half of the experts."""
    return jax.make_mesh((2, 2), ("data", "expert"), (jax.sharding.AxisType.Auto,) * 2, devices=devices[:4])


def products(x, up, down, meta):
    """Compute all experts of [experts, tokens, features], each with states of its own."""

    def one(x, up, down, meta):
        hidden = jnp.maximum(
            owg.fp8_dot_general(x, up, (((1,), (0,)), ((), ())), meta=meta["up"], scaling=SCALING), 0.0
        )
        return owg.fp8_dot_general(hidden, down, (((1,), (0,)), ((), ())), meta=meta["down"], scaling=SCALING)

    return jax.vmap(one)(x, up, down, meta)


def parallel(x, up, down, meta):
    """The same with experts of this device alone, for tokens [experts, capacity, features] of this device."""
    rows = jax.lax.all_to_all(x, "expert", 0, 1, tiled=True)
    return jax.lax.all_to_all(products(rows, up, down, meta), "expert", 1, 0, tiled=True)


def integers(*shape, seed):
    """Small integers, of which no cast loses anything and whose sums are exact in any order."""
    return jnp.asarray(np.random.default_rng(seed).integers(-2, 3, shape), jnp.float32)


def test_experts_on_devices_train_as_on_one(mesh):
    sizes = 4.0 ** jnp.arange(EXPERTS, dtype=jnp.float32)[:, None, None]  # each expert has scales of its own
    up, down = integers(EXPERTS, FEATURES, HIDDEN, seed=1) * sizes, integers(EXPERTS, HIDDEN, FEATURES, seed=2)
    meta = {name: jax.tree.map(lambda a: jnp.stack([a] * EXPERTS), owg.init_meta(SCALING)) for name in ("up", "down")}
    x = integers(4, EXPERTS, CAPACITY, FEATURES, seed=3)
    factor = integers(4, EXPERTS, CAPACITY, FEATURES, seed=4)
    # device 3 alone has the largest token of expert 1, and nobody has one for expert 2
    x = x.at[3, 1, 0, 0].set(8.0).at[:, 2].set(0.0)

    def whole(parameters, x, factor):
        rows = jnp.moveaxis(x, 0, 1).reshape(EXPERTS, -1, FEATURES)
        y = products(rows, *parameters).reshape(EXPERTS, 4, CAPACITY, FEATURES)
        return (jnp.moveaxis(y, 1, 0) * factor).sum()

    def local(parameters, x, factor):
        value, gradients = jax.value_and_grad(lambda p: (parallel(x[0], *p) * factor[0]).sum())(parameters)
        return jax.lax.psum(value, ("data", "expert")), gradients

    of_experts, of_tokens = P("expert"), P(("data", "expert"))
    mapped = jax.jit(
        jax.shard_map(local, mesh=mesh, in_specs=(of_experts, of_tokens, of_tokens), out_specs=(P(), of_experts))
    )
    states = []
    for function in (mapped, jax.jit(jax.value_and_grad(whole))):
        own = meta
        for _ in range(3):  # the scales of one step are those that the step before observed
            value, gradients = function((up, down, own), x, factor)
            own = gradients[2]
        states.append(jax.device_get((value, gradients)))
    (value, gradients), (wanted, others) = states
    jax.tree.map(np.testing.assert_array_equal, gradients[2], others[2])
    # of two devices that have copies of an expert, each scales its part of the sum back before they are added
    for found, expected in zip((value, *gradients[:2]), (wanted, *others[:2]), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())
    history = states[0][1][2]["up"]["kernel_amax_history"]
    assert len(np.unique(history.max(axis=1))) == EXPERTS, "each expert has an amax of its own"
    inputs = states[0][1][2]["up"]["input_amax_history"]
    assert inputs[1].max() == 8.0, "what one device saw is known to its copy"
    assert inputs[2].max() <= 0.0, "nobody saw a token"
