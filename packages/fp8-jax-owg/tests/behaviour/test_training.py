"""Training: what is not observed, not finite or not valid changes nothing; optimizers train parameters alone.

An optimizer that knows nothing of the state makes the next step NaN, and the report says so.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

import fp8_jax_owg as owg
import jax_layers
from fp8_common import Fp8Error
from fp8_jax_owg import DelayedScaling
from fp8_jax_owg import linen as owg_linen
from fp8_jax_owg import nnx as owg_nnx
from fp8_jax_owg.optimizers import MultiSteps, bypass_owg
from fp8_jax_owg.state import cotangents
from jax_layers import BOTH, COLLECTION, T, dot, newest, normal, start, use

SCALING = DelayedScaling(amax_history_length=4)
WIDTH = 8


@pytest.fixture(autouse=True)
def standard_promotion():
    """optax raises floats to integer powers."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def bits(tree):
    return [np.asarray(leaf).view(np.int32).tolist() for leaf in jax.tree.leaves(tree)]


# ---------------------------------------------------------------- optimizers

NEXT = np.float32([1e-11, 1e30, 1e-40, 0])


def variables():
    params = {"w": jnp.full((8, 4), 0.5), "b": jnp.full(4, -0.5)}
    return {"params": params, COLLECTION: {"layer": {"amax": jnp.full(4, 7.0)}}}


def gradients():
    params = {"w": jnp.full((8, 4), 0.1), "b": jnp.full(4, 3.0)}
    return {"params": params, COLLECTION: {"layer": {"amax": cotangents.encode(jnp.asarray(NEXT))}}}


OPTIMIZERS = {
    "adamw": lambda: optax.adamw(1e-2, weight_decay=0.1),
    "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=4),
    "chain": lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.add_decayed_weights(0.1), optax.adam(1e-2)),
    "partition": lambda: optax.partition({1: optax.sgd(1.0), 2: optax.adam(1e-2)}, lambda tree: T(jnp.ndim, tree)),
}


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_next_values_pass_and_parameters_train_as_alone(make):
    """And steps of several micro-batches, all equal here, are those of one."""
    alone, wrapped, several = make(), bypass_owg(make()), MultiSteps(make(), 2)
    theirs, mine, now = variables()["params"], variables(), variables()
    states = [alone.init(theirs), wrapped.init(mine), several.init(now)]
    shapes = [[np.shape(leaf) for leaf in jax.tree.leaves(state)] for state in states[:2]]
    assert shapes[0] == shapes[1], "the state of the optimizer holds parameters alone"
    update_alone, update, update_several = map(jax.jit, (alone.update, wrapped.update, several.update))
    for _ in range(2):
        updates, states[0] = update_alone(gradients()["params"], states[0], theirs)
        theirs = optax.apply_updates(theirs, updates)
        updates, states[1] = update(gradients(), states[1], mine)
        mine = owg.apply_updates(mine, updates)
        for micro in range(2):
            updates, states[2] = update_several(gradients(), states[2], now)
            before, now = now, owg.apply_updates(now, updates)
            if micro == 0:
                T(np.testing.assert_array_equal, before, now)
    for found in (mine, now):
        assert bits(found[COLLECTION]["layer"]["amax"]) == bits(NEXT)
        T(np.testing.assert_array_equal, found["params"], theirs)


def test_multi_steps_roll_once_per_step_of_the_optimizer_what_was_observed():
    optimizer = MultiSteps(optax.sgd(1.0), 2)
    now = {"w": jnp.float32(3), "s": owg.tree.Overwrite(start()), "unused": owg.tree.Overwrite(start())}
    state = optimizer.init(now)

    @jax.jit
    def step(now, state, x):
        found = owg.grad(lambda v: v["w"] * x + 0 * use(x, v["s"].value))(now)
        updates, state = optimizer.update(found, state, now)
        return owg.apply_updates(now, updates), state

    for index, x in enumerate(jnp.float32([5, 1, 7, 2])):
        now, state = step(now, state, x)
        assert optimizer.has_updated(state) == bool(index % 2)
    # two rolls: 2, 0, 3 -> 5, 3, 2 -> 7, 2, 5
    assert np.asarray(now["s"].value["input_amax_history"]).tolist() == [7, 2, 5]
    T(np.testing.assert_array_equal, now["unused"].value, start())
    assert float(now["w"]) == 3 - 3 - 4.5


def test_what_would_roll_at_every_micro_batch_raises():
    with pytest.raises(Fp8Error, match="every_k_schedule must be at least 1, got 0"):
        MultiSteps(optax.sgd(1.0), 0)
    with pytest.raises(Fp8Error, match="would roll amax histories at every micro-batch"):
        bypass_owg(optax.MultiSteps(optax.sgd(1.0), 2))


@pytest.mark.parametrize("outside", [True, False])
def test_apply_if_finite_leaves_out_steps_that_are_not_finite_and_no_others(outside):
    finite = lambda inner: optax.apply_if_finite(inner, 5)  # noqa: E731
    optimizer = finite(bypass_owg(optax.sgd(1.0))) if outside else bypass_owg(finite(optax.sgd(1.0)))
    now = {"w": jnp.float32(0), "s": owg.tree.Overwrite(jnp.float32([7, 7]))}
    state = optimizer.init(now)
    for w in (1.0, np.inf, 2.0):
        # the second element was never observed
        updates, state = optimizer.update(
            {"w": jnp.float32(w), "s": owg.tree.Overwrite(jnp.float32([w, 0]))}, state, now
        )
        now = owg.apply_updates(now, updates)
    assert now["w"] == -3
    assert now["s"].value.tolist() == [2, 7]


STOCK = {
    "sgd": lambda: optax.sgd(1e-2),
    "gradients of several steps": lambda: optax.MultiSteps(optax.sgd(0.1), 2).gradient_transformation(),
    "updates that are finite": lambda: optax.apply_if_finite(optax.sgd(0.1), 5),
    "a rule for each label": lambda: optax.partition(
        {"train": optax.sgd(0.1), "freeze": optax.set_to_zero()},
        lambda tree: {"w": "train", "fc": T(lambda _: "freeze", tree["fc"])},
    ),
}


@pytest.mark.parametrize("how", STOCK)
def test_a_stock_optimizer_over_the_state_is_loud(how):
    optimizer = STOCK[how]()
    tree = {"w": jnp.float32(1), "fc": owg.tree.Overwrite(start())}
    state = optimizer.init(tree)
    step = jax.jit(owg.value_and_grad(lambda t: t["w"] * use(5.0, t["fc"].value)))
    for _ in range(2):
        updates, state = optimizer.update(step(tree)[1], state, tree)
    after, added = owg.apply_updates(tree, updates), optax.apply_updates(tree, updates)
    if how == "a rule for each label":  # which leaves the state alone: it is frozen, and the report says so
        assert all(one.stale for one in owg.report(after, tree).tensors)
        return
    assert owg.report(after).suspicious
    assert owg.report(added).suspicious
    assert np.isnan(step(added)[0])


# ---------------------------------------------------------------- Linen


def data(scale=1.0):
    return normal(4, WIDTH) * scale


@pytest.fixture
def state():
    model = jax_layers.dense(WIDTH, scaling=SCALING)
    variables = jax.jit(model.init)(jax.random.key(0), data())
    return owg_linen.TrainState.create(apply_fn=model.apply, params=variables, tx=optax.adam(1e-2))


@jax.jit
def step(state, x):
    def loss(v):
        return (state.apply_fn(v, x) ** 2).mean()

    value, grads = owg.value_and_grad(loss)(state.params)
    return state.apply_gradients(grads=grads, valid=jnp.isfinite(value) & owg.tree.all_finite(grads)), value


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_step_that_is_not_finite_changes_nothing_but_the_step_and_the_next_recovers(state, bad):
    state, _ = step(state, data())
    poisoned = data().at[0, 0].set(bad)
    grads = jax.jit(owg.grad(lambda v: (state.apply_fn(v, poisoned) ** 2).mean()))(state.params)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(grads[COLLECTION]))
    after, _ = step(state, poisoned)
    assert after.step == 2
    assert bits((after.params, after.opt_state)) == bits((state.params, state.opt_state))
    after, loss = step(after, data(2.0))
    assert newest(after.params) == np.abs(data(2.0)).max()
    assert np.isfinite(loss)


def test_an_overflow_of_half_precision_is_seen_and_the_step_left_out():
    meta = jax_layers.meta_of(SCALING, input=[2, 3, 1, 1], kernel=[2, 3, 1, 1], output_grad=[2, 3, 1, 1])
    variables, x = {"w": normal(8, 8, seed=1), "fp8": owg.tree.Overwrite(meta)}, normal(4, 8, dtype="float16")

    def loss(variables, factor):
        y = dot(x, variables["w"].astype("float16"), variables["fp8"].value, SCALING)
        # the cotangent overflows in the backward pass of this product
        return (y * jnp.float16(factor)).sum().astype(jnp.float32)

    gradient = jax.jit(owg.grad(loss))
    assert owg.tree.all_finite(gradient(variables, 1.0))
    overflowed = gradient(variables, 2.0**18)
    assert not owg.tree.all_finite(overflowed)
    # what was seen of finite tensors is recorded, of the others nothing: the next step has usable scales
    after = owg.tree.next_state(variables, overflowed)["fp8"].value
    np.testing.assert_array_equal(after["output_grad_amax_history"], meta["output_grad_amax_history"])
    assert newest(after) == np.abs(np.asarray(x, np.float32)).max()


def test_all_finite_looks_at_parameters_alone():
    state = owg.tree.Overwrite(jnp.float32([-np.inf]))
    assert owg.tree.all_finite({"w": jnp.ones(3), "fp8": state})
    assert not owg.tree.all_finite({"w": jnp.float32([1, np.nan]), "fp8": state})
    assert owg.tree.all_finite({})


# ---------------------------------------------------------------- other collections


class Normed(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = jax_layers.dense(WIDTH, scaling=SCALING)(x)
        return nn.BatchNorm(use_running_average=False, momentum=0.5)(x)


def decayed(steps=None):
    """A state whose optimizer would move everything that it sees."""
    model, tx = Normed(), optax.adamw(1e-1, weight_decay=1.0)
    params = jax.jit(model.init)(jax.random.key(0), data())
    tx = MultiSteps(tx, steps) if steps else tx
    return owg_linen.TrainState.create(apply_fn=model.apply, params=params, tx=tx)


@partial(jax.jit, static_argnames="keep")
def step_of_normed(state, x, keep=True, valid=True):
    def loss(variables):
        y, changed = state.apply_fn(variables, x, mutable=["batch_stats"])
        return (y**2).mean(), changed

    grads, changed = owg.grad(loss, has_aux=True)(state.params)
    return state.apply_gradients(grads=grads, mutable=changed if keep else None, valid=valid)


@pytest.mark.parametrize("steps", [None, 1])
def test_batch_statistics_are_not_trained_and_take_what_the_step_has_changed(steps):
    state = decayed(steps)
    moments = {np.shape(leaf) for leaf in jax.tree.leaves(state.opt_state)}
    alone = optax.adamw(1e-1).init(state.params["params"])
    inner = state.opt_state.parameters.inner_opt_state if steps else state.opt_state
    assert T(np.shape, jax.tree.leaves(inner)) == T(np.shape, jax.tree.leaves(alone)), moments
    left = step_of_normed(state, data(), keep=False)
    assert bits(left.params["batch_stats"]) == bits(state.params["batch_stats"])
    assert bits(left.params["params"]) != bits(state.params["params"])
    invalid = step_of_normed(state, data(), valid=jnp.bool_(False))
    assert bits(invalid.params) == bits(state.params)
    after = step_of_normed(state, data())
    _, wanted = state.apply_fn(state.params, data(), mutable=["batch_stats"])
    T(partial(np.testing.assert_allclose, rtol=1e-6), after.params["batch_stats"], wanted["batch_stats"])
    assert newest(after.params[COLLECTION]) == np.abs(data()).max()
    assert jax.tree.structure(after.params) == jax.tree.structure(state.params)


def test_collections_that_a_state_does_not_keep_raise():
    state = decayed()
    grads = T(jnp.zeros_like, state.params)
    for name in ("intermediates", COLLECTION, "params"):
        with pytest.raises(Fp8Error, match=rf"mutable holds '{name}', and this state keeps \['batch_stats'\]"):
            state.apply_gradients(grads=grads, mutable={name: state.params.get(name, {})})


def test_an_optimizer_of_variables_asks_which_collections_it_trains():
    tree = {"params": {"w": jnp.ones(2)}, "lora": {"a": jnp.ones(2)}, COLLECTION: {"s": start()}}
    for make in (bypass_owg, partial(MultiSteps, every_k_schedule=1)):
        with pytest.raises(Fp8Error, match=r"got 'lora' in addition to 'params'.*trained=\('params',\)"):
            make(optax.sgd(1.0)).init(tree)
        for trained, moved in ((("params",), ["w"]), (("params", "lora"), ["a", "w"])):
            optimizer = make(optax.sgd(1.0), trained=trained)
            updates, _ = optimizer.update(T(jnp.ones_like, tree), optimizer.init(tree), tree)
            after = owg.apply_updates(tree, updates)
            found = {"w": after["params"]["w"], "a": after["lora"]["a"]}
            assert sorted(name for name in found if (found[name] == 0).all()) == moved
    # without collections, and with the state alone beside `params`, there is nothing to ask
    for plain in ({"w": jnp.ones(2), "head": jnp.ones(2)}, {"params": jnp.ones(2), COLLECTION: {"s": start()}}):
        bypass_owg(optax.sgd(1.0)).init(plain)


# ---------------------------------------------------------------- NNX


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


def history(layer):
    return np.asarray(layer.dot_general.input_amax_history[...])


def test_nnx_trains_and_keeps_what_is_unused():
    model = NnxTwo(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)

    @partial(nnx.jit, static_argnums=3)
    def train(model, optimizer, x, second):
        (loss, aux), grads = owg_nnx.value_and_grad(lambda m: (nnx_loss(m, x, second), "aux"), has_aux=True)(model)
        assert aux == "aux"
        assert jax.tree.structure(grads) == jax.tree.structure(nnx.state(model, nnx.Param))
        optimizer.update(model, grads)
        return loss

    first_loss = train(model, optimizer, data(), True)
    used, kept = history(model.second), bits(nnx.state(model.second, owg_nnx.OverwriteWithGradient))
    mean = np.asarray(model.norm.mean[...])
    last_loss = train(model, optimizer, data(2.0), False)
    assert used[0] > 0
    assert bits(nnx.state(model.second, owg_nnx.OverwriteWithGradient)) == kept
    assert history(model.first)[0] == np.abs(data(2.0)).max()
    assert (np.asarray(model.norm.mean[...]) != mean).any()
    assert np.isfinite([first_loss, last_loss]).all()
    assert int(optimizer.step[...]) == 2


def test_nnx_skips_and_accumulates_with_the_state_in_the_gradient():
    model = NnxTwo(nnx.Rngs(0))
    variables, optimizer = nnx.state(model, BOTH), MultiSteps(optax.sgd(1e-2), 2)
    opt_state, before = optimizer.init(variables), bits(variables)
    gradient = nnx.jit(owg_nnx.value_and_grad(nnx_loss, wrt=BOTH))
    for micro in (1.0, 3.0):
        loss, grads = gradient(model, data(micro))
        assert bits(nnx.state(model, BOTH)) == before
        updates, opt_state = optimizer.update(grads, opt_state, variables)
        variables = owg.apply_updates(variables, updates)
    assert bits(owg.tree.where_step_valid(jnp.isnan(loss), variables, nnx.state(model, BOTH))) == before
    nnx.update(model, variables)
    np.testing.assert_array_equal(history(model.first), np.float32([np.abs(data(3.0)).max(), 0, 0, 0]))
