"""Mode "fan_out" counts the uses of a state: what JAX would add up is refused, all that is combined passes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import fp8_jax_owg as owg
from fp8_common import Fp8Error
from fp8_jax_owg import DelayedScaling, fp8_dot_general, init_meta

MATMUL = (((1,), (0,)), ((), ()))
SCALING = DelayedScaling(amax_history_length=3)


@pytest.fixture(autouse=True)
def fan_out():
    with owg.use_mode("fan_out"):
        yield


def inputs():
    return jnp.float32([1, 5, 3])[:, None, None] * jnp.ones((3, 2, 4))


def layer(x, meta):
    return fp8_dot_general(x, jnp.eye(4), MATMUL, meta=meta, scaling=SCALING).sum()


def twice(meta):
    return layer(inputs()[0], meta) + layer(inputs()[1], meta)


def closed_over(meta):
    return lax.scan(lambda c, x: (c + layer(x, meta), None), jnp.float32(0), inputs())[0]


def carried(meta):
    def body(carry, x):
        return (carry[0] + layer(x, carry[1]), carry[1]), None

    return lax.scan(body, (jnp.float32(0), meta), inputs())[0][0]


def in_a_loop_and_after(meta):
    return scanned(meta) + layer(inputs()[0], meta)


def twice_in_the_body(meta):
    return owg.scan(lambda c, x, m: (c + layer(x, m) + layer(2 * x, m), None), jnp.float32(0), inputs(), owg=meta)[0]


def behind_a_gate(meta):
    gated = owg.gate(meta, jnp.bool_(True))
    return layer(inputs()[0], gated) + layer(inputs()[1], gated)


def in_functions(meta):
    return jax.jit(layer)(inputs()[0], meta) + jax.checkpoint(layer)(inputs()[1], meta)


def in_a_branch_and_before(meta):
    return layer(inputs()[0], meta) + lax.cond(True, lambda m: layer(inputs()[1], m), lambda m: jnp.float32(0), meta)


def broadcast(meta):
    each = jax.tree.map(lambda leaf: jnp.stack([leaf] * 3), meta)
    return jax.vmap(layer)(inputs(), each).sum()


REFUSED = [twice, closed_over, carried, in_a_loop_and_after, twice_in_the_body, behind_a_gate, in_functions]
REFUSED += [in_a_branch_and_before, broadcast]


@pytest.mark.parametrize("loss", REFUSED, ids=lambda loss: loss.__name__)
def test_what_would_be_added_up_is_refused(loss):
    tree = {"fc": owg.Overwrite(init_meta(SCALING))}
    with pytest.raises(Fp8Error, match=r"\['fc'\].*_amax_history.* is used more than once, and 5 more.*share\(state"):
        jax.jit(owg.grad(lambda tree: loss(tree["fc"].value)))(tree)
    with owg.use_mode("extended"):
        state = jax.jit(owg.grad(lambda tree: loss(tree["fc"].value)))(tree) if loss in (twice, in_functions) else None
    assert state is None or state["fc"].value["input_amax_history"][0] == 5


def once(meta):
    return layer(inputs()[1], meta)


def scanned(meta):
    return owg.scan(lambda c, x, m: (c + layer(x, m), None), jnp.float32(0), inputs(), owg=meta)[0]


def shared(meta):
    slots = owg.share(meta, 3)
    return sum(layer(x, owg.read(slots, i)) for i, x in enumerate(inputs()))


def branches(meta):
    return lax.cond(True, lambda m: layer(inputs()[1], m), lambda m: layer(inputs()[0], m), meta)


def examples(meta):
    return jax.vmap(layer, (0, None))(inputs(), meta).sum()


@pytest.mark.parametrize("loss", [once, scanned, shared, branches, examples], ids=lambda loss: loss.__name__)
def test_what_is_combined_passes_and_is_right(loss):
    tree = {"fc": owg.Overwrite(init_meta(SCALING))}
    (value, aux), after = owg.value_and_grad(lambda tree, _: (loss(tree["fc"].value), "aux"), has_aux=True)(tree, "x")
    assert (float(value) > 0, aux) == (True, "aux")
    np.testing.assert_array_equal(after["fc"].value["input_amax_history"], [5, 0, 0])


def test_stages_of_one_state_are_uses_of_different_slices():
    stacked = jax.tree.map(lambda leaf: jnp.stack([leaf] * 3), init_meta(SCALING))

    def loss(tree):
        return sum(layer(x, jax.tree.map(lambda a, i=i: a[i], tree["fc"].value)) for i, x in enumerate(inputs()))

    after = jax.jit(owg.grad(loss))({"fc": owg.Overwrite(stacked)})["fc"].value
    np.testing.assert_array_equal(after["input_amax_history"][:, 0], [1, 5, 3])


@pytest.mark.parametrize("join", ["stack", "concatenate"])
def test_states_of_layers_that_are_joined_for_a_loop_are_used_once_each(join):
    states = {name: owg.Overwrite(init_meta(SCALING)) for name in ("first", "second", "third")}

    def joined(*leaves):
        return jnp.stack(leaves) if join == "stack" else jnp.concatenate([leaf[None] for leaf in leaves])

    def loss(tree, names):
        each = jax.tree.map(joined, *[tree[name].value for name in names])
        return lax.scan(lambda c, one: (c + layer(*one), None), jnp.float32(0), (inputs(), each))[0]

    after = jax.jit(owg.grad(lambda tree: loss(tree, ["first", "second", "third"])))(states)
    assert [after[name].value["input_amax_history"][0] for name in states] == [1, 5, 3]
    with pytest.raises(Fp8Error, match=r"\['first'\].* is used more than once"):
        jax.jit(owg.grad(lambda tree: loss(tree, ["first", "second", "first"])))(states)
