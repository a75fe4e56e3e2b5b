"""One state, many uses: the amax that is recorded is the maximum over exactly those that share the state."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fp8_jax_owg as owg
from fp8_common import Fp8Error
from fp8_jax_owg import CurrentScaling, DelayedScaling, fp8_dot_general, fp8_ragged_dot, init_meta

SCALING = DelayedScaling(amax_history_length=3)
MATMUL = (((1,), (0,)), ((), ()))
AMAX = jnp.float32([1, 5, 3, 2])


@pytest.fixture
def data():
    """Four inputs [2, 8] with amax 1, 5, 3, 2 and a kernel."""
    x = np.random.default_rng(0).uniform(-1, 1, (4, 2, 8)).astype(np.float32)
    x[:, 0, 0] = 1
    return AMAX[:, None, None] * x, jnp.asarray(np.random.default_rng(1).normal(size=(8, 5)), jnp.float32)


def recorded(loss, meta, jit=True):
    """The newest amax of the input, after one step."""
    gradient = jax.grad(loss)
    after = (jax.jit(gradient) if jit else gradient)(meta)
    return np.asarray(owg.next_state(meta, after)["input_amax_history"])[..., 0]


def use(x, w, meta):
    return fp8_dot_general(x, w, MATMUL, meta=meta, scaling=SCALING)


def stack(meta, n):
    return jax.tree.map(lambda leaf: jnp.stack([leaf] * n), meta)


@pytest.mark.parametrize("jit", [True, False])
def test_a_shared_state_under_vmap_sees_the_maximum(data, jit):
    x, w = data
    meta = init_meta(SCALING)
    assert recorded(lambda m: jax.vmap(lambda x: use(x, w, m))(x).sum(), meta, jit) == 5
    twice = jax.vmap(jax.vmap(lambda x, m: use(x, w, m), (0, None)), (0, None))
    assert recorded(lambda m: twice(x.reshape(2, 2, 2, 8), m).sum(), meta, jit) == 5


def test_a_state_for_each_example_sees_its_own(data):
    x, w = data
    each = recorded(lambda m: jax.vmap(lambda x, m: use(x, w, m))(x, m).sum(), stack(init_meta(SCALING), 4))
    np.testing.assert_array_equal(each, [1, 5, 3, 2])
    pairs = x.reshape(2, 2, 2, 8)
    outer = jax.vmap(jax.vmap(lambda x, m: use(x, w, m), (0, None)), (0, 0))
    inner = jax.vmap(jax.vmap(lambda x, m: use(x, w, m), (0, 0)), (0, None))
    two = stack(init_meta(SCALING), 2)
    np.testing.assert_array_equal(recorded(lambda m: outer(pairs, m).sum(), two), [5, 3])
    np.testing.assert_array_equal(recorded(lambda m: inner(pairs, m).sum(), two), [3, 5])


def test_loops_that_share_the_state_see_the_maximum(data):
    x, w = data

    def loss(meta):
        return owg.scan(lambda c, x, m: (c + use(x, w, m).sum(), None), jnp.float32(0), x, owg=meta)[0]

    assert recorded(loss, init_meta(SCALING)) == 5


def test_vmapped_experts_keep_their_own_state(data):
    x, _ = data
    w = jnp.asarray(np.random.default_rng(2).normal(size=(4, 8, 5)), jnp.float32)
    experts = stack(init_meta(SCALING), 4)
    after = jax.grad(lambda m: jax.vmap(use)(x, w, m).sum())(experts)
    np.testing.assert_array_equal(after["kernel_amax_history"][:, 0], np.abs(w).max((1, 2)))
    np.testing.assert_array_equal(after["input_amax_history"][:, 0], AMAX)


SIZES = [[3, 0, 4], [0, 0, 0], [8, 0, 0], [2, 3, 3]]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_ragged_products_skip_empty_groups_and_foreign_rows(sizes):
    random = np.random.default_rng(0)
    x, w, g = (jnp.asarray(random.normal(size=s), jnp.float32) for s in ((8, 16), (3, 16, 5), (8, 5)))
    used = sum(sizes)
    x, g = x.at[used:].set(jnp.nan), g.at[used:].set(jnp.inf)
    meta = init_meta(SCALING)

    def run(x, w, meta):
        return fp8_ragged_dot(x, w, jnp.int32(sizes), meta=meta, scaling=SCALING)

    out, pull = jax.vjp(run, x, w, meta)
    d_x, d_w, after = pull(g)
    np.testing.assert_array_equal(out[used:], 0)
    np.testing.assert_array_equal(d_x[used:], 0)
    row = 0
    for group, size in enumerate(sizes):
        rows = slice(row, row := row + size)
        if not size:
            np.testing.assert_array_equal(d_w[group], 0)
            continue
        close(out[rows], x[rows] @ w[group])
        close(d_x[rows], g[rows] @ w[group].T)
        close(d_w[group], x[rows].T @ g[rows])
    after = owg.next_state(meta, after)
    assert after["input_amax_history"][0] == np.abs(x[:used]).max(initial=0)
    assert after["output_grad_amax_history"][0] == np.abs(g[:used]).max(initial=0)


def close(found, wanted):
    assert np.linalg.norm(found - wanted) < 0.08 * np.linalg.norm(wanted)


def test_ragged_products_run_in_fp8():
    def gradients(x, w):
        return jax.grad(lambda x, w: fp8_ragged_dot(x, w, jnp.int32([1, 3])).sum(), (0, 1))(x, w)

    dots = owg.assert_fp8_dots(gradients, jnp.ones((4, 8)), jnp.ones((2, 8, 5)))
    assert len(dots) == 3


def test_ragged_products_refuse_what_they_cannot_do():
    x, w = jnp.ones((4, 8)), jnp.ones((2, 8, 5))
    with pytest.raises(Fp8Error, match=r"needs lhs \[M, K\]"):
        fp8_ragged_dot(x, w, jnp.int32([1, 2, 1]))
    with pytest.raises(Fp8Error, match="one scale per tensor"):
        fp8_ragged_dot(x, w, jnp.int32([1, 3]), scaling=CurrentScaling(granularity="row"))
