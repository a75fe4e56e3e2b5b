"""What delayed scaling records: equal, bit for bit, to the NumPy definition over twice the length of the history."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fp8_common
from fp8_common import Fp8Error, ScalePolicy
from fp8_jax_owg import _cotangent_encoding as cotangents
from fp8_jax_owg.observation import not_observed, observe, observed_amax, resolve, used_scale

LENGTH = 4
STREAM = np.float32([2, 3, 4, 0.5, 1e-40, 0, 7, np.inf, 3e-12, np.nan, 1e38, 5, 0, 0, 0, 0, 0, 1])


def step(state, amax, fmt, policy):
    """One step: use the scale, observe, overwrite."""
    used = used_scale(*state, fmt, policy)
    return tuple(map(resolve, state, observe(amax, used[1], state[1]))), used


@pytest.mark.matrix(fmt=["e4m3", "e5m2"], margin=[0, 2, -3], algo=["max", "most_recent"], jit=[True, False])
def test_scales_and_histories_equal_the_definition(fmt, margin, algo, jit):
    policy = ScalePolicy(margin=margin, algo=algo)
    run = jax.jit(step, static_argnums=(2, 3)) if jit else step
    state = (jnp.ones(1), jnp.zeros(LENGTH))
    window, scale = np.zeros(LENGTH, np.float32), np.float32(1)
    for amax in STREAM:
        state, (used, inverse) = run(state, jnp.float32(amax), fmt, policy)
        assert np.asarray(used).view(np.int32) == scale.view(np.int32)
        if np.isfinite(amax):
            assert state[0] == inverse
        window, seen = fp8_common.update_history(window, np.float32(amax), algo)
        scale = fp8_common.amax_to_scale(seen, fmt, policy, prev=scale)
        np.testing.assert_array_equal(np.asarray(state[1]).view(np.int32), window.view(np.int32))
        assert np.isfinite(np.asarray(state[0])).all()


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_what_is_not_finite_is_not_recorded_and_the_next_step_is_sound(bad):
    state = (jnp.float32([0.25]), jnp.float32([2, 0, 3]))
    x = jnp.float32([1, bad])
    after, _ = step(state, observed_amax(x, state[1]), "e4m3", ScalePolicy())
    assert [list(np.asarray(a)) for a in after] == [[0.25], [2, 0, 3]]
    after, (used, _) = step(after, jnp.float32(1), "e4m3", ScalePolicy())
    assert used[0] == np.float32(448) / np.float32(3)
    assert list(np.asarray(after[1])) == [1, 3, 2]


def test_a_kept_scale_is_kept_exactly():
    scales = np.random.default_rng(0).uniform(1e-3, 1e3, 4096).astype(np.float32)
    back = np.float32(1) / (np.float32(1) / scales)
    assert (back != scales).any()
    kept = jax.vmap(lambda s: used_scale(s[None], jnp.zeros(3), "e4m3")[1][0])(jnp.asarray(scales))
    np.testing.assert_array_equal(np.asarray(kept), scales)


def test_uses_combine_by_max_to_one_roll():
    scale, history = jnp.float32([0.5]), jnp.float32([2, 0, 3])
    _, scale_inv = used_scale(scale, history, "e4m3")
    uses = [observe(jnp.float32(amax), scale_inv, history) for amax in (1, 5, np.inf, 4)]
    decoded = [[cotangents.decode(g) for g in use] for use in uses]
    scales, histories = (jnp.stack(leaves) for leaves in zip(*decoded, strict=True))
    assert cotangents.maximum_over(scales, 0)[0] == fp8_common.reciprocal(np.float32(448) / np.float32(3))
    assert list(np.asarray(cotangents.maximum_over(histories, 0))) == [5, 3, 2]


def test_nothing_observed_keeps_every_element():
    state = jnp.float32([3, 1e-40, 0, 1e30])
    for gradient in (not_observed(state), jnp.zeros(4), jnp.full(4, jnp.nan)):
        np.testing.assert_array_equal(np.asarray(resolve(state, gradient)).view(np.int32), state.view(np.int32))
    mixed = jnp.where(jnp.asarray([True, False, True, False]), cotangents.encode(jnp.zeros(4)), not_observed(state))
    np.testing.assert_array_equal(np.asarray(resolve(state, mixed)), np.float32([0, 1e-40, 0, 1e30]))


@pytest.mark.parametrize("algo", ["max", "most_recent"])
def test_zeros_as_plain_gradients_leave_them_count_as_zeros(algo):
    """`jax.grad` without `owg.grad` stores what travels: -2^-126 stands for 0."""
    policy = ScalePolicy(algo=algo)
    travelled = cotangents.encode(jnp.zeros(3))
    assert (np.asarray(travelled) < 0).all()
    into, back = used_scale(jnp.float32([0.25]), travelled, "e4m3", policy)
    assert (into[0], back[0]) == (4, 0.25)
    mixed = travelled.at[0].set(7)
    assert used_scale(jnp.ones(1), mixed, "e4m3", policy)[0][0] == np.float32(448) / np.float32(7)


def test_a_state_in_another_dtype_is_refused():
    with pytest.raises(Fp8Error, match="must be float32, got bfloat16"):
        used_scale(jnp.ones(1, jnp.bfloat16), jnp.zeros(3), "e4m3")
