"""Models of Linen converted by rules."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

import fp8_jax_owg as owg
from fp8_common import Fp8Error
from fp8_jax_owg import DelayedScaling
from fp8_jax_owg import linen as owg_linen

SCALING = DelayedScaling(amax_history_length=2)
COLLECTION = "_overwrite_with_gradient"


def sample():
    return jnp.asarray(np.random.default_rng(0).normal(size=(2, 6, 8)), jnp.float32)


def test_a_linen_model_keeps_its_parameters_and_gets_state():
    class Inner(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(4, name="last")(nn.Conv(8, (3,), name="conv")(nn.DenseGeneral(8, name="first")(x)))

    plain, x = Inner(), sample()
    model = owg_linen.convert_to_fp8(plain, ["*", "!last", "conv = tensorwise"], scaling=SCALING)
    wanted = jax.jit(plain.init)(jax.random.key(0), x)
    variables = jax.jit(model.init)(jax.random.key(0), x)
    jax.tree.map(np.testing.assert_array_equal, variables["params"], wanted["params"])
    assert set(variables[COLLECTION]) == {"first"}
    y, exact = model.apply(variables, x), plain.apply(wanted, x)
    assert 0 < np.linalg.norm(y - exact) < 0.1 * np.linalg.norm(exact)
    after = jax.jit(owg.grad(lambda v: (model.apply(v, x) ** 2).sum()))(variables)[COLLECTION]
    (state,) = after["first"].values()
    assert state["input_amax_history"][0] == np.abs(x).max()
    # the layers of the module itself stay as they were
    np.testing.assert_array_equal(plain.apply(wanted, x), exact)


def test_a_linen_model_in_which_nothing_is_converted_is_named():
    with pytest.raises(Fp8Error, match="No layer of Dense was converted"):
        owg_linen.convert_to_fp8(nn.Dense(4), ["!*"]).init(jax.random.key(0), sample())
    by_filter = owg_linen.convert_to_fp8(nn.Sequential([nn.Dense(4), nn.Dense(3)]), lambda _, name: name == "layers_1")
    assert set(by_filter.init(jax.random.key(0), sample())[COLLECTION]) == {"layers_1"}


def test_layers_of_a_converted_model_under_scan_and_in_attention():
    class Block(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            return nn.MultiHeadDotProductAttention(2, qkv_features=8)(x), None

    stack = nn.scan(Block, variable_axes={"params": 0, COLLECTION: 0}, split_rngs={"params": True}, length=2)
    model = owg_linen.convert_to_fp8(stack(), scaling=SCALING)
    variables = jax.jit(lambda key, x: model.init(key, x, None))(jax.random.key(0), sample())
    after = jax.jit(owg.grad(lambda v: (model.apply(v, sample(), None)[0] ** 2).sum()))(variables)[COLLECTION]
    histories = [a for p, a in jax.tree_util.tree_leaves_with_path(after) if "input_amax" in str(p)]
    assert len(histories) == 4
    assert all(history.shape == (2, 2) and (history[:, 0] > 0).all() for history in histories)
