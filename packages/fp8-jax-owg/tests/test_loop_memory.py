"""What loops keep: of a history its newest entry alone, and next to nothing beside flax, in the same run."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import fp8_jax_owg as owg
from fp8_jax_owg import DelayedScaling, fp8_dot_general, init_meta

fp8_ops = pytest.importorskip("flax.linen.fp8_ops", reason="compares with flax")

ITERATIONS, WIDTH = 64, 8
MATMUL = (((1,), (0,)), ((), ()))


def ours(w, meta, xs):
    def body(carry, x, meta):
        return carry + fp8_dot_general(x, w, MATMUL, meta=meta).sum(), None

    return owg.scan(body, jnp.float32(0), xs, owg=meta)[0]


def theirs(w, meta, xs):
    names = {"lhs": "input", "rhs": "kernel", "grad": "output_grad"}
    state = {f"{a}_{leaf}": meta[f"{b}_{leaf}"] for a, b in names.items() for leaf in ("scale", "amax_history")}

    def body(carry, x):
        return carry + fp8_ops.fp8_scaled_dot_general(x, w, MATMUL, preferred_element_type=x.dtype, **state).sum(), None

    return lax.scan(body, jnp.float32(0), xs)[0]


def arguments(length):
    meta = init_meta(DelayedScaling(amax_history_length=length))
    return jnp.ones((WIDTH, WIDTH)), meta, jnp.ones((ITERATIONS, 1, WIDTH))


def temporary_bytes(loop, length):
    compiled = jax.jit(jax.grad(loop, (0, 1))).lower(*arguments(length)).compile()
    return compiled.memory_analysis().temp_size_in_bytes


def test_a_loop_needs_a_fiftieth_of_the_temporaries_of_flax(mode):
    assert temporary_bytes(ours, 1024) <= temporary_bytes(theirs, 1024) / 50


def stacked_bytes(loop, length):
    """Bytes that the forward keeps for the backward, of every iteration its own."""
    _, pull = jax.vjp(loop, *arguments(length))
    return sum(leaf.nbytes for leaf in jax.tree.leaves(pull) if jnp.shape(leaf)[:1] == (ITERATIONS,))


def test_what_iterations_keep_does_not_depend_on_the_length_of_histories(mode):
    assert stacked_bytes(ours, 4096) == stacked_bytes(ours, 2) > 0
    # the measure sees histories where they are kept
    assert stacked_bytes(theirs, 4096) > stacked_bytes(theirs, 2) + ITERATIONS * 4096


def next_state(loss, meta, **options):
    tree = {"s": owg.Overwrite(meta)}
    return jax.jit(owg.grad(lambda t: loss(t["s"].value), **options))(tree)["s"].value


@pytest.mark.parametrize("nested", [False, True])
def test_a_history_rolls_once_and_keeps_its_entries(mode, nested):
    meta = init_meta(DelayedScaling(amax_history_length=4)) | {"input_amax_history": jnp.float32([2, 9, 0, 3])}
    xs = jnp.float32([1, 5, 3, 2]).reshape(4, 1, 1) * jnp.ones((4, 1, WIDTH))

    def loss(meta):
        if not nested:
            return ours(jnp.eye(WIDTH), meta, xs)

        def step(carry, x, meta):
            return carry + ours(jnp.eye(WIDTH), meta, x), None

        return owg.scan(step, jnp.float32(0), xs.reshape(2, 2, 1, WIDTH), owg=meta)[0]

    after = next_state(loss, meta)
    np.testing.assert_array_equal(after["input_amax_history"], [5, 0, 3, 2])
    np.testing.assert_array_equal(after["output_grad_amax_history"], [1, 0, 0, 0])
    assert after["input_scale"] == np.float32(1) / (np.float32(448) / np.float32(9))


@pytest.mark.parametrize("how", ["untaken", "infinite"])
def test_a_history_that_no_iteration_observes_stays(mode, how):
    meta = init_meta(DelayedScaling(amax_history_length=3)) | {"input_amax_history": jnp.float32([2, 0, 3])}

    def loss(meta):
        def body(carry, x, meta):
            def product(meta):
                return fp8_dot_general(x, jnp.eye(WIDTH), MATMUL, meta=meta).sum()

            if how == "infinite":
                return carry + product(meta), None
            return carry + lax.cond(x.max() > 0, product, lambda _: jnp.float32(0), meta), None

        value = np.inf if how == "infinite" else 0
        return owg.scan(body, jnp.float32(0), jnp.full((3, 1, WIDTH), value, jnp.float32), owg=meta)[0]

    after = next_state(loss, meta)
    np.testing.assert_array_equal(after["input_amax_history"], meta["input_amax_history"])
    assert after["input_scale"] == 1
    marked = next_state(loss, meta, unobserved="-inf")["input_amax_history"]
    np.testing.assert_array_equal(marked, [-np.inf] * 3)
