"""Training states of Linen and NNX: what is not observed, not finite or not valid changes nothing."""

from functools import partial

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
from fp8_jax_owg.optax import MultiSteps
from tests.helpers import jax_layers

SCALING = DelayedScaling(amax_history_length=4)
COLLECTION = "_overwrite_with_gradient"
WIDTH = 8


@pytest.fixture(autouse=True)
def standard_promotion():
    """optax raises floats to integer powers."""
    with jax.numpy_dtype_promotion("standard"):
        yield


class Two(nn.Module):
    """A layer that always runs, and one that is dropped at random: by Python, or by `lax.cond`."""

    @nn.compact
    def __call__(self, x, second=True):
        dense = partial(jax_layers.dense, WIDTH, scaling=SCALING)
        x, other = dense(name="first")(x), dense(name="second")
        if isinstance(second, bool):
            return other(x) if second else x
        if self.is_initializing():
            return other(x)
        return nn.cond(second, lambda module, x: module(x), lambda module, x: x, other, x)


@pytest.fixture(scope="module")
def model():
    return Two()


@pytest.fixture
def state(model):
    variables = jax.jit(model.init)(jax.random.key(0), data())
    return owg_linen.TrainState.create(apply_fn=model.apply, params=variables, tx=optax.adam(1e-2))


def data(scale=1.0):
    return jnp.asarray(np.random.default_rng(0).normal(size=(4, WIDTH)) * scale, jnp.float32)


@partial(jax.jit, static_argnames="second")
def step(state, x, second=True):
    loss, grads = owg.value_and_grad(lambda v: (state.apply_fn(v, x, second) ** 2).mean())(state.params)
    return state.apply_gradients(grads=grads), loss


@jax.jit
def step_with_cond(state, x, second):
    loss, grads = owg.value_and_grad(lambda v: (state.apply_fn(v, x, second) ** 2).mean())(state.params)
    return state.apply_gradients(grads=grads), loss


def bits(tree):
    return [np.asarray(leaf).view(np.int32).tolist() for leaf in jax.tree.leaves(tree)]


@pytest.mark.parametrize("how", ["python", "cond"])
def test_a_dropped_layer_keeps_its_state_bit_for_bit(state, how):
    run = (lambda s, on: step(s, data(), on)) if how == "python" else (lambda s, on: step_with_cond(s, data(), on))
    state, _ = run(state, True)
    before = state.params[COLLECTION]
    for _ in range(3):
        state, loss = run(state, False)
        assert np.isfinite(loss)
    after = state.params[COLLECTION]
    assert bits(after["second"]) == bits(before["second"])
    assert bits(after["first"]) != bits(before["first"])
    out = state.apply_fn(state.params, data())
    assert np.isfinite(out).all()
    assert (np.asarray(out) != 0).any()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_never_enters_and_the_next_step_recovers(state, bad):
    state, _ = step(state, data())
    poisoned = data().at[0, 0].set(bad)
    grads = jax.jit(owg.grad(lambda v: (state.apply_fn(v, poisoned) ** 2).mean()))(state.params)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(grads[COLLECTION]))
    clean = jax.tree.map(jnp.nan_to_num, grads)
    state = state.apply_gradients(grads=grads | {"params": jax.tree.map(jnp.zeros_like, clean["params"])})
    state, loss = step(state, data(2.0))
    (inner,) = state.params[COLLECTION]["first"].values()
    assert inner["input_amax_history"][0] == np.abs(data(2.0)).max()
    assert np.isfinite(loss)


def test_a_step_that_is_not_valid_changes_nothing_but_the_step(state):
    state, _ = step(state, data())

    @jax.jit
    def guarded(state, x):
        loss, grads = owg.value_and_grad(lambda v: (state.apply_fn(v, x) ** 2).mean())(state.params)
        return state.apply_gradients(grads=grads, valid=jnp.isfinite(loss) & owg.all_finite(grads))

    after = guarded(state, data().at[0, 0].set(jnp.nan))
    assert after.step == 2
    assert bits((after.params, after.opt_state)) == bits((state.params, state.opt_state))
    assert bits(guarded(state, data()).params) != bits(state.params)


def test_multi_steps_roll_a_history_once_per_step(model, state):
    state = owg_linen.TrainState.create(apply_fn=model.apply, params=state.params, tx=MultiSteps(optax.sgd(1e-2), 2))
    for factor in (3.0, 1.0, 2.0, 4.0):
        state, _ = step(state, data(factor))
    (inner,) = state.params[COLLECTION]["first"].values()
    amax = np.abs(data()).max()
    np.testing.assert_array_equal(inner["input_amax_history"], np.float32([amax * 4, 0, 0, amax * 3]))


class NnxTwo(nnx.Module):
    def __init__(self, rngs):
        self.first = jax_layers.linear(WIDTH, WIDTH, scaling=SCALING, rngs=rngs)
        self.second = jax_layers.linear(WIDTH, WIDTH, scaling=SCALING, rngs=rngs)
        self.norm = nnx.BatchNorm(WIDTH, rngs=rngs)

    def __call__(self, x, second=True):
        x = self.norm(self.first(x))
        return self.second(x) if second else x


def nnx_loss(model, x, second=True):
    return (model(x, second) ** 2).mean() + model.first.kernel[...].sum() * 1e-3


def newest(layer):
    return np.asarray(layer.dot_general.input_amax_history[...])


@pytest.mark.parametrize("jit", [True, False], ids=["jit", "eager"])
def test_nnx_trains_and_keeps_what_is_unused(jit):
    model = NnxTwo(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)

    def train(model, optimizer, x, second):
        loss, grads = owg_nnx.value_and_grad(nnx_loss)(model, x, second)
        optimizer.update(model, grads)
        return loss

    run = nnx.jit(train, static_argnums=3) if jit else train
    first_loss = run(model, optimizer, data(), True)
    used, kept = newest(model.second), bits(nnx.state(model.second, owg_nnx.OverwriteWithGradient))
    mean = np.asarray(model.norm.mean[...])
    last_loss = run(model, optimizer, data(2.0), False)
    assert used[0] > 0
    assert bits(nnx.state(model.second, owg_nnx.OverwriteWithGradient)) == kept
    assert newest(model.first)[0] == np.abs(data(2.0)).max()
    assert (np.asarray(model.norm.mean[...]) != mean).any()
    assert np.isfinite([first_loss, last_loss]).all()
    assert int(optimizer.step[...]) == 2


def test_nnx_skips_and_accumulates_with_the_state_in_the_gradient():
    model = NnxTwo(nnx.Rngs(0))
    both = nnx.Any(nnx.Param, owg_nnx.OverwriteWithGradient)
    variables, optimizer = nnx.state(model, both), MultiSteps(optax.sgd(1e-2), 2)
    opt_state, before = optimizer.init(variables), bits(variables)
    for micro in (1.0, 3.0):
        gradient = owg_nnx.value_and_grad(lambda model, x: (nnx_loss(model, x), "aux"), has_aux=True, wrt=both)
        (loss, aux), grads = gradient(model, data(micro))
        assert aux == "aux"
        assert bits(nnx.state(model, both)) == before
        updates, opt_state = optimizer.update(grads, opt_state, variables)
        variables = owg.apply_updates(variables, updates)
    skipped = owg.where_step_valid(jnp.isnan(loss), variables, nnx.state(model, both))
    assert bits(skipped) == before
    nnx.update(model, variables)
    np.testing.assert_array_equal(newest(model.first), np.float32([np.abs(data(3.0)).max(), 0, 0, 0]))


def test_nnx_gives_gradients_of_parameters_and_has_replaced_the_state():
    model = NnxTwo(nnx.Rngs(0))
    gradients, aux = owg_nnx.grad(lambda m: (nnx_loss(m, data()), "aux"), has_aux=True)(model)
    assert aux == "aux"
    assert jax.tree.structure(gradients) == jax.tree.structure(nnx.state(model, nnx.Param))
    assert newest(model.first)[0] == np.abs(data()).max()


@pytest.mark.parametrize("tx", [optax.adam(1e-2), MultiSteps(optax.adam(1e-2), 2)], ids=["adam", "MultiSteps"])
def test_no_state_after_a_step_holds_what_is_live_inside_of_a_loss(model, tx):
    """What a checkpoint would save has shapes and dtypes of its own, in eager steps and in compiled ones."""
    variables = jax.jit(model.init)(jax.random.key(0), data())
    before = owg_linen.TrainState.create(apply_fn=model.apply, params=variables, tx=tx)
    for run in (step, step.__wrapped__):
        after, _ = run(before, data())
        after, _ = run(after, data())
        shapes = [[(jnp.shape(x), jnp.result_type(x)) for x in jax.tree.leaves(one)[1:]] for one in (before, after)]
        assert shapes[0] == shapes[1]
        assert "fp32_max_grad" not in str(shapes)
