"""Training loops that know nothing of the state: refused, or NaN in the second step."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

import fp8_jax_owg as owg
from fp8_jax_owg import DelayedScaling
from fp8_jax_owg import linen as owg_linen
from fp8_jax_owg import nnx as owg_nnx
from tests.helpers import jax_layers

SCALING = DelayedScaling(amax_history_length=4)
MATMUL = (((1,), (0,)), ((), ()))
COLLECTION = "_overwrite_with_gradient"


def x():
    return jnp.float32([[1, -2, 3, 5], [0.5, 1, -1, 2]])


def square(y):
    return (y**2).mean()


def linear():
    return owg_nnx.convert_to_fp8(nnx.Linear(4, 3, rngs=nnx.Rngs(0)), scaling=SCALING)


LAYERS = {
    "linear": (linear, lambda m: m(x())),
    "einsum": (lambda: jax_layers.einsum("bi,io->bo", (4, 3), scaling=SCALING, rngs=nnx.Rngs(0)), lambda m: m(x())),
    "conv": (
        lambda: owg_nnx.convert_to_fp8(nnx.Conv(4, 3, (1,), rngs=nnx.Rngs(0)), scaling=SCALING),
        lambda m: m(x()[None]),
    ),
}


@pytest.mark.parametrize("layer", LAYERS)
def test_the_stock_gradient_of_nnx_warns(layer):
    make, call = LAYERS[layer]
    step = nnx.jit(nnx.value_and_grad(lambda model: square(call(model))))
    with pytest.warns(owg.UnsharedStateWarning, match=r"is trained and.*is not.*fp8_jax_owg.nnx.value_and_grad"):
        step(make())
    wide = nnx.DiffState(0, nnx.Any(nnx.Param, owg_nnx.OverwriteWithGradient))
    _, grads = nnx.value_and_grad(lambda model: square(call(model)), argnums=wide)(make())
    history = next(v for path, v in nnx.to_flat_state(grads) if path[-1] == "input_amax_history")
    assert history[...][0] == 5


@pytest.mark.parametrize("how", ["plain", "scan", "remat", "einsum"])
def test_parameters_of_linen_without_their_state_warn(how):
    class Layer(nn.Module):
        @nn.compact
        def __call__(self, h, _=None):
            if how == "einsum":
                kernel = self.param("kernel", nn.initializers.ones, (4, 4))
                return owg_linen.Fp8Einsum(scaling=SCALING)("bi,io->bo", h, kernel)
            h = jax_layers.dense(4, scaling=SCALING)(h)
            return (h, None) if how == "scan" else h

    kinds = {
        "scan": lambda: nn.scan(
            Layer, variable_axes={"params": 0, COLLECTION: 0}, split_rngs={"params": True}, length=2
        )(),
        "remat": lambda: nn.remat(Layer)(),
    }
    model = kinds.get(how, Layer)()
    variables = model.init(jax.random.key(0), x(), None)

    def loss(variables):
        out = model.apply(variables, x(), None)
        return square(out[0] if how == "scan" else out)

    with pytest.warns(owg.UnsharedStateWarning, match="A kernel is trained and the FP8 state beside it is not"):
        jax.jit(jax.grad(lambda params: loss({"params": params, COLLECTION: variables[COLLECTION]})))(
            variables["params"]
        )
    with pytest.warns(owg.UnsharedStateWarning, match="differentiated by plain jax.grad"):
        jax.jit(jax.grad(loss))(variables)
    with warnings.catch_warnings():
        warnings.simplefilter("error", owg.UnsharedStateWarning)
        jax.jit(owg.grad(loss))(variables)


def test_a_matmul_of_two_activations_differentiates_with_frozen_state():
    """As attention under a frozen teacher, or below adapters, does."""
    einsum = owg_linen.Fp8Einsum(scaling=SCALING)
    q = jnp.ones((1, 2, 4))
    variables = einsum.init(jax.random.key(0), "bsd,btd->bst", q, q)
    gradient = jax.grad(lambda q: einsum.apply(variables, "bsd,btd->bst", q, q).sum())(q)
    np.testing.assert_array_equal(gradient, jnp.full_like(q, 4))


@pytest.mark.parametrize("tx", [optax.sgd(1e-2), optax.sgd(1e-2, momentum=0.9)], ids=["sgd", "momentum"])
def test_a_stock_optimizer_that_subtracts_from_the_state_gives_nan_in_the_second_step(tx):
    variables = {"w": jnp.ones((4, 3)), "fp8": owg.Overwrite(owg.init_meta(SCALING))}
    opt_state = tx.init(variables)

    @jax.jit
    def step(variables, opt_state):
        def loss(v):
            return square(owg.fp8_dot_general(x(), v["w"], MATMUL, meta=v["fp8"].value, scaling=SCALING))

        value, grads = owg.value_and_grad(loss)(variables)
        updates, opt_state = tx.update(grads, opt_state, variables)
        return optax.apply_updates(variables, updates), opt_state, value

    variables, opt_state, first = step(variables, opt_state)
    assert len(owg.report(variables).suspicious) == 3
    _, _, second = step(variables, opt_state)
    assert np.isfinite(first)
    assert np.isnan(second)


def test_a_sum_over_the_iterations_of_a_plain_loop_gives_nan_in_the_second_step():
    xs = jnp.float32([1, 5, 3, 2])[:, None, None] * jnp.ones((4, 2, 2))

    def use(h, meta):
        return owg.fp8_dot_general(h, jnp.eye(2), MATMUL, meta=meta, scaling=SCALING).sum()

    def plain(meta):
        return jax.lax.scan(lambda c, h: (c + use(h, meta), None), jnp.float32(0), xs)[0]

    def greatest(meta):
        return owg.scan(lambda c, h, m: (c + use(h, m), None), jnp.float32(0), xs, owg=meta)[0]

    values, states = {}, {}
    for loss in (plain, greatest):
        step = jax.jit(jax.value_and_grad(loss))
        _, states[loss] = step(owg.init_meta(SCALING))
        values[loss], _ = step(states[loss])
    assert np.isnan(values[plain])
    assert np.isfinite(values[greatest])
    assert "encoded zeros were added up" in owg.report(states[plain]).suspicious[0].suspicion
    assert not owg.report(states[greatest]).suspicious


def test_report_names_a_scale_that_stays_at_one():
    meta = owg.init_meta(SCALING) | {"input_amax_history": jnp.float32([2, 0, 3, 4])}
    assert "a scale of exactly 1 behind earlier amax" in owg.report(meta).tensors[0].suspicion
    assert not owg.report(meta | {"input_amax_history": jnp.float32([2, 0, 0, 0])}).suspicious
    assert not owg.report(meta | {"input_amax_history": jnp.float32([2, 0, 0, 448])}).suspicious
