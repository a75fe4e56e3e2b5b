"""Checkpoints: orbax carries variables as they are; older ones become variables of today's model."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx

import fp8_jax_owg as owg
import jax_layers
from fp8_common import Fp8Error
from fp8_jax_owg import DelayedScaling, checkpoint
from jax_layers import COLLECTION

SCALING = DelayedScaling(amax_history_length=4)


def variables(length=4, seed=0):
    model = jax_layers.dense(8, scaling=DelayedScaling(amax_history_length=length))
    return jax.jit(model.init)(jax.random.key(seed), jnp.ones((2, 8)))


def trained(length=4):
    found = variables(length)
    random = np.random.default_rng(1)
    state = jax.tree.map(lambda x: jnp.asarray(random.uniform(1, 9, x.shape), jnp.float32), found[COLLECTION])
    return found | {COLLECTION: state}


def assert_same(one, other):
    assert jax.tree.structure(one) == jax.tree.structure(other)
    jax.tree.map(np.testing.assert_array_equal, one, other)


KINDS = {
    "linen": lambda: trained(),
    "marked": lambda: {"w": jnp.ones(3), "amax": owg.tree.Overwrite(jnp.float32([1e-11, 1e30]))},
    "nnx": lambda: nnx.state(jax_layers.linear(4, 4, scaling=SCALING, rngs=nnx.Rngs(0))),
}


@pytest.mark.parametrize("kind", KINDS)
def test_orbax_saves_and_restores_bit_for_bit(tmp_path, kind):
    tree = KINDS[kind]()
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "checkpoint", tree)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "checkpoint", jax.tree.map(jnp.zeros_like, tree))
    assert_same(restored, tree)
    assert jax.tree.leaves(owg.tree.owg_mask(restored)) == jax.tree.leaves(owg.tree.owg_mask(tree))


def test_a_bf16_checkpoint_gets_a_fresh_state():
    saved = {"params": jax.tree.map(lambda x: np.asarray(x).astype(ml_dtypes.bfloat16), trained()["params"])}
    new = checkpoint.upgrade(saved, jax.eval_shape(variables))
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(new)} == {"float32"}
    assert_same(new[COLLECTION], variables()[COLLECTION])
    np.testing.assert_array_equal(new["params"]["kernel"], np.asarray(saved["params"]["kernel"], np.float32))


def test_scales_that_multiply_are_inverted():
    saved = trained()
    te = jax.tree_util.tree_map_with_path(lambda p, x: 1 / x if "scale" in str(p[-1]) else x, saved)
    new = checkpoint.upgrade(te, variables(), scales="quantize")
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-7), new, saved)


def test_values_that_are_not_finite_start_again():
    def spoil(x):
        return x.at[..., 0].set(jnp.inf).at[..., -1].set(jnp.nan)

    saved = trained()
    new = checkpoint.upgrade(saved | {COLLECTION: jax.tree.map(spoil, saved[COLLECTION])}, variables())
    (state,) = new[COLLECTION].values()
    assert state["input_scale"] == 1
    assert (state["input_amax_history"][0], state["input_amax_history"][-1]) == (0, 0)
    assert (state["input_amax_history"][1:3] > 0).all()


# newest first, then from the oldest on: 9 now, 8 one step ago, 7 two steps ago, 6 three steps ago
@pytest.mark.parametrize(
    ("length", "wanted"),
    [(4, [9, 6, 7, 8]), (2, [9, 8]), (1, [9]), (3, [9, 7, 8]), (6, [9, 0, 0, 6, 7, 8])],
)
def test_histories_keep_their_newest_entries(length, wanted):
    history = jnp.float32([[9, 6, 7, 8]] * 2)
    np.testing.assert_array_equal(checkpoint.resize_history(history, length), [wanted] * 2)
    single = checkpoint.resize_history(jnp.float32([3]), length)
    assert single.tolist() == [3] + [0] * (length - 1)


def test_nnx_states_are_upgraded_by_place():
    layer = jax_layers.linear(4, 4, scaling=SCALING, rngs=nnx.Rngs(0))
    wanted = nnx.state(layer)
    saved = {"kernel": np.ones((4, 4), np.float32), "bias": np.ones(4, np.float32)}
    new = checkpoint.upgrade(saved, wanted)
    assert jax.tree.structure(new) == jax.tree.structure(wanted)
    assert new["kernel"].get_value().sum() == 16


CHANGES = {
    "nothing": (lambda t: {}, r"lacks the parameter params/bias of shape \(8,\)"),
    "smaller": (
        lambda t: {"params": jax.tree.map(lambda x: x[:3], t["params"])},
        r"has shape \(3,\) in the checkpoint",
    ),
    "stacked": (lambda t: t | {COLLECTION: jax_layers.stacked(t[COLLECTION], 2)}, "in the checkpoint, not"),
}


@pytest.mark.parametrize(("change", "message"), CHANGES.values(), ids=CHANGES)
def test_what_does_not_fit_raises(change, message):
    with pytest.raises(Fp8Error, match=message):
        checkpoint.upgrade(change(trained()), variables())
    with pytest.raises(Fp8Error, match="scales must be one of dequantize, quantize, got 'te'"):
        checkpoint.upgrade(trained(), variables(), scales="te")
