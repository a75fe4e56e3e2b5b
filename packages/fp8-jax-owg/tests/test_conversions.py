"""Models of Linen and Equinox converted by rules, and `filter_value_and_grad` of the latter."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

import fp8_jax_owg as owg
from fp8_common import Fp8Error
from fp8_jax_owg import CurrentScaling, DelayedScaling
from fp8_jax_owg import linen as owg_linen
from fp8_jax_owg.optax import bypass_owg

eqx = pytest.importorskip("equinox", reason="needs equinox")
owg_eqx = pytest.importorskip("fp8_jax_owg.equinox")

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


def mlp():
    return eqx.nn.MLP(4, 3, 8, 2, key=jax.random.key(0))


def test_an_equinox_model_is_converted_by_rules():
    model = owg_eqx.convert_to_fp8(mlp(), ["*", "!layers.2", "layers.1 = tensorwise"], scaling=SCALING)
    first, second, third = model.layers
    assert (first.scaling, second.scaling, second.fp8) == (SCALING, CurrentScaling(), None)
    assert type(third) is eqx.nn.Linear
    with pytest.raises(Fp8Error, match=r"No layer to convert among 3 \(layers.0"):
        owg_eqx.convert_to_fp8(mlp(), lambda layer, name: False)


def test_equinox_models_train_with_examples_that_share_their_state():
    model = owg_eqx.convert_to_fp8(mlp(), scaling=SCALING)
    xs = jnp.float32([1, 5, 3])[:, None] * jnp.ones((3, 4))
    tx = bypass_owg(optax.sgd(0.1))
    opt_state = tx.init(eqx.filter(model, eqx.is_inexact_array))

    @eqx.filter_jit
    def step(model, opt_state, xs):
        loss = lambda model, xs: ((jax.vmap(model)(xs) ** 2).mean(), "aux")  # noqa: E731
        (value, _), grads = owg_eqx.filter_value_and_grad(loss, has_aux=True)(model, xs)
        updates, opt_state = tx.update(grads, opt_state, eqx.filter(model, eqx.is_inexact_array))
        return owg_eqx.apply_updates(model, updates), opt_state, value

    model, opt_state, first = step(model, opt_state, xs)
    np.testing.assert_array_equal(model.layers[0].fp8.value["input_amax_history"], [5, 0])
    for _ in range(5):
        model, opt_state, last = step(model, opt_state, xs)
    assert last < first
    np.testing.assert_array_equal(model.layers[0].fp8.value["input_amax_history"], [5, 5])
    assert not owg.report(model).suspicious


def test_a_weight_that_is_trained_without_its_state_is_refused():
    model, x = owg_eqx.convert_to_fp8(mlp(), scaling=SCALING), jnp.ones(4)
    chosen = jax.tree.map(lambda state, leaf: eqx.is_inexact_array(leaf) and not state, owg.owg_mask(model), model)
    trained, rest = eqx.partition(model, chosen)
    with pytest.raises(Fp8Error, match="The kernel of an Fp8Linear is trained and its FP8 state is not"):
        jax.grad(lambda trained: eqx.combine(trained, rest)(x).sum())(trained)


def test_stacked_equinox_layers_have_a_state_each():
    make = eqx.filter_vmap(lambda key: eqx.nn.Linear(4, 4, key=key))
    stack = owg_eqx.convert_to_fp8(make(jax.random.split(jax.random.key(0), 3)), scaling=SCALING)

    def loss(model, x):
        arrays, rest = eqx.partition(model, eqx.is_array)
        return jax.lax.scan(lambda h, one: (eqx.combine(one, rest)(h), None), x, arrays)[0].sum()

    after = eqx.filter_jit(owg_eqx.filter_grad(loss))(stack, jnp.full(4, 3.0))
    assert after.fp8.value["input_amax_history"].shape == (3, 2)
    assert after.fp8.value["input_amax_history"][0, 0] == 3
