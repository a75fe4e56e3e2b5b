"""optax trains parameters and never sees overwritten leaves: their next values pass unchanged."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fp8_jax_owg as owg
from fp8_common import Fp8Error
from fp8_jax_owg.optax import MultiSteps, bypass_owg
from fp8_jax_owg.state import cotangents
from fp8_jax_owg.state.pairs import COLLECTION

NEXT = np.float32([1e-11, 1e30, 1e-40, 0])


def variables():
    params = {"w": jnp.full((8, 4), 0.5), "b": jnp.full(4, -0.5)}
    return {"params": params, COLLECTION: {"layer": {"amax": jnp.full(4, 7.0)}}}


def gradients():
    params = {"w": jnp.full((8, 4), 0.1), "b": jnp.full(4, 3.0)}
    return {"params": params, COLLECTION: {"layer": {"amax": cotangents.encode(jnp.asarray(NEXT))}}}


def label(tree):
    return jax.tree.map(lambda x: "matrix" if x.ndim == 2 else "vector", tree)


OPTIMIZERS = {
    "sgd": lambda: optax.sgd(0.1, momentum=0.9),
    "adam": lambda: optax.adam(1e-2),
    "adamw": lambda: optax.adamw(1e-2, weight_decay=0.1),
    "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=4),
    "chain": lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.add_decayed_weights(0.1), optax.adam(1e-2)),
    "masked": lambda: optax.masked(optax.adam(1e-2), lambda tree: jax.tree.map(lambda x: x.ndim == 2, tree)),
    "partition": lambda: optax.partition({"matrix": optax.adam(1e-2), "vector": optax.sgd(1.0)}, label),
    "ema": lambda: optax.chain(optax.ema(0.9), optax.sgd(0.1)),
}


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("jit", [True, False], ids=["jit", "eager"])
def test_next_values_pass_and_parameters_train_as_alone(make, jit):
    alone, wrapped = make(), bypass_owg(make())
    state, alone_state = wrapped.init(variables()), alone.init(variables()["params"])
    mine, theirs = variables(), variables()["params"]
    update = jax.jit(wrapped.update) if jit else wrapped.update
    update_alone = jax.jit(alone.update) if jit else alone.update
    with jax.numpy_dtype_promotion("standard"):
        for _ in range(3):
            updates, state = update(gradients(), state, mine)
            mine = owg.apply_updates(mine, updates)
            alone_updates, alone_state = update_alone(gradients()["params"], alone_state, theirs)
            theirs = optax.apply_updates(theirs, alone_updates)
    bits = np.asarray(mine[COLLECTION]["layer"]["amax"]).view(np.int32)
    np.testing.assert_array_equal(bits, NEXT.view(np.int32))
    jax.tree.map(np.testing.assert_array_equal, mine["params"], theirs)


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_the_state_of_the_optimizer_holds_parameters_alone(make):
    wrapped, alone = bypass_owg(make()).init(variables()), make().init(variables()["params"])
    shapes = [[np.shape(leaf) for leaf in jax.tree.leaves(state)] for state in (wrapped, alone)]
    assert shapes[0] == shapes[1]


def test_the_norm_that_clips_is_that_of_the_parameters():
    huge = gradients()
    huge[COLLECTION]["layer"]["amax"] = jnp.full(4, 1e30)
    optimizer = bypass_owg(optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1.0)))
    updates, _ = optimizer.update(huge, optimizer.init(variables()), variables())
    np.testing.assert_allclose(
        np.sqrt(sum(np.square(x).sum() for x in jax.tree.leaves(owg.split(updates)[0]))), 1.0, rtol=1e-6
    )


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_multi_steps_replace_once_per_step(make):
    optimizer = MultiSteps(make(), 2)
    state, now = optimizer.init(variables()), variables()
    with jax.numpy_dtype_promotion("standard"):
        for index in range(4):
            updates, state = jax.jit(optimizer.update)(gradients(), state, now)
            before, now = now, owg.apply_updates(now, updates)
            if index % 2 == 0:
                jax.tree.map(np.testing.assert_array_equal, before, now)
    np.testing.assert_array_equal(np.asarray(now[COLLECTION]["layer"]["amax"]), NEXT)
    assert (np.asarray(now["params"]["w"]) != 0.5).all()


def test_multi_steps_average_parameters_and_keep_what_was_never_observed():
    optimizer = MultiSteps(optax.sgd(1.0), 3).gradient_transformation()
    now = {"w": jnp.float32(0), "s": owg.Overwrite(jnp.float32([7, 7]))}
    state = optimizer.init(now)
    for w, amax in [(1, 4), (2, 9), (6, 5)]:
        seen = owg.Overwrite(jnp.float32([amax, -np.inf]))
        updates, state = optimizer.update({"w": jnp.float32(w), "s": seen}, state, now)
        now = owg.apply_updates(now, updates)
    assert now["w"] == -3
    assert now["s"].value.tolist() == [9, 7]


def test_a_number_of_steps_below_one_is_refused():
    with pytest.raises(Fp8Error, match="every_k_schedule must be at least 1, got 0"):
        MultiSteps(optax.sgd(1.0), 0)


def test_multi_steps_of_optax_inside_are_refused():
    with pytest.raises(Fp8Error, match="would roll amax histories at every micro-batch"):
        bypass_owg(optax.MultiSteps(optax.sgd(1.0), 2))


@pytest.mark.parametrize("outside", [True, False])
def test_apply_if_finite_leaves_out_steps_that_are_not_finite_and_no_others(outside):
    finite = lambda inner: optax.apply_if_finite(inner, 5)  # noqa: E731
    optimizer = finite(bypass_owg(optax.sgd(1.0))) if outside else bypass_owg(finite(optax.sgd(1.0)))
    now = {"w": jnp.float32(0), "s": owg.Overwrite(jnp.float32([7, 7]))}
    state = optimizer.init(now)
    for w in (1.0, np.inf, 2.0):
        # the second element was never observed
        updates, state = optimizer.update({"w": jnp.float32(w), "s": owg.Overwrite(jnp.float32([w, 0]))}, state, now)
        now = owg.apply_updates(now, updates)
    assert now["w"] == -3
    assert now["s"].value.tolist() == [2, 7]
