"""JAX's debugging flags, export with symbolic shapes, static layers, shapes as targets of checkpoints."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from jax import export

import fp8_jax_owg as owg
from fp8_common import Fp8Error
from fp8_jax_owg import DelayedScaling, checkpoint
from fp8_jax_owg.linen import Fp8DotGeneralOp
from tests.helpers import jax_layers

SCALING = DelayedScaling(amax_history_length=2)
MATMUL = (((1,), (0,)), ((), ()))


def loss(tree, x):
    y = owg.fp8_dot_general(x, tree["w"], MATMUL, meta=tree["fp8"].value, scaling=SCALING)
    return (y**2).sum()


def variables():
    return {"w": jnp.ones((4, 3)), "fp8": owg.Overwrite(owg.init_meta(SCALING))}


@pytest.mark.parametrize("jit", [True, False], ids=["jit", "eager"])
@pytest.mark.parametrize("flag", ["jax_debug_nans", "jax_debug_infs"])
def test_debugging_flags_stop_at_nothing_of_ours(flag, jit):
    gradient = owg.grad(loss)
    with getattr(jax, flag.removeprefix("jax_"))(True):
        after = (jax.jit(gradient) if jit else gradient)(variables(), jnp.ones((2, 4)))
    assert after["fp8"].value["input_amax_history"][0] == 1


@pytest.mark.parametrize("jit", [True, False], ids=["jit", "eager"])
def test_debug_nans_stops_at_a_nan_of_the_user(jit):
    gradient = owg.grad(loss)
    with jax.debug_nans(True), pytest.raises(FloatingPointError, match="nan"):
        (jax.jit(gradient) if jit else gradient)(variables(), jnp.full((2, 4), jnp.nan))


def test_export_with_a_symbolic_batch():
    (rows,) = export.symbolic_shape("b")
    x = jax.ShapeDtypeStruct((rows, 4), jnp.float32)
    program = export.export(jax.jit(loss))(variables(), x)
    assert program.call(variables(), jnp.ones((5, 4))) == loss(variables(), jnp.ones((5, 4)))


def test_layers_of_one_operation_are_equal():
    # two partials never compare equal, so a program that makes layers anew makes the partial once
    dense = functools.partial(nn.Dense, 4, dot_general_cls=functools.partial(Fp8DotGeneralOp, scaling=SCALING))
    assert dense() == dense()
    assert dense() != nn.Dense(4, dot_general_cls=Fp8DotGeneralOp)
    traced = []

    @functools.partial(jax.jit, static_argnums=0)
    def run(layer, variables, x):
        traced.append(layer)
        return layer.apply(variables, x)

    values = dense().init(jax.random.key(0), jnp.ones((2, 3)))
    for _ in range(4):
        run(dense(), values, jnp.ones((2, 3)))
    assert len(traced) == 1


def test_a_checkpoint_is_upgraded_to_shapes():
    layer, x = jax_layers.dense(4, scaling=SCALING), jnp.ones((2, 3))
    shapes = jax.eval_shape(layer.init, jax.random.key(0), x)
    saved = layer.init(jax.random.key(0), x)
    jax.tree.map(np.testing.assert_array_equal, checkpoint.upgrade(saved, shapes), saved)
    without = checkpoint.upgrade({"params": saved["params"]}, shapes)
    jax.tree.map(np.testing.assert_array_equal, without, saved)


def test_a_history_of_another_length_than_the_settings_is_refused():
    layer, x = jax_layers.dense(4, scaling=SCALING), jnp.ones((2, 3))
    saved = jax_layers.dense(4, scaling=DelayedScaling(amax_history_length=5)).init(jax.random.key(0), x)
    with pytest.raises(Fp8Error, match=r"have 5 entries.*amax_history_length=2.*checkpoint.upgrade"):
        layer.apply(saved, x)
    assert layer.apply(checkpoint.upgrade(saved, layer.init(jax.random.key(0), x)), x).shape == (2, 4)
    # without settings the state tells its length
    assert owg.fp8_dot_general(x, jnp.ones((3, 4)), MATMUL, meta=owg.init_meta(SCALING)).shape == (2, 4)
