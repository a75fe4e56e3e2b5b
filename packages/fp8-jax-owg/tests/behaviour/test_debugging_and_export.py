"""JAX's debugging flags, and steps that are exported."""

import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

import fp8_jax_owg as owg
import jax_layers
from jax_layers import SCALING, dot


def loss(tree, x):
    return (dot(x, tree["w"], tree["fp8"].value, SCALING) ** 2).sum()


def variables():
    return {"w": jnp.ones((4, 3)), "fp8": owg.tree.Overwrite(owg.init_meta(SCALING))}


@pytest.mark.parametrize("jit", [True, False], ids=["jit", "eager"])
@pytest.mark.parametrize("flag", ["debug_nans", "debug_infs"])
def test_debugging_flags_stop_at_nothing_of_ours_and_at_nan_of_the_user(flag, jit):
    def step(tree, x):
        return owg.tree.next_state(tree, owg.grad(loss)(tree, x))

    run = jax.jit(step) if jit else step
    with getattr(jax, flag)(True):
        for amax in (0, 1):
            after = run(variables(), amax * jnp.ones((2, 4)))
            assert after["fp8"].value["input_amax_history"][0] == amax
        if flag == "debug_nans":
            with pytest.raises(FloatingPointError, match="nan"):
                run(variables(), jnp.full((2, 4), jnp.nan))


def test_an_exported_step_takes_any_batch_and_replaces_the_state():
    """Written and read again where flatbuffers are installed."""

    @jax.jit
    def step(w, meta, x):
        tree = {"w": w, "fp8": owg.tree.Overwrite(meta)}
        return owg.tree.next_state(tree, owg.grad(loss)(tree, x))["fp8"].value

    (rows,) = export.symbolic_shape("b")
    state, x = owg.init_meta(SCALING), jax.ShapeDtypeStruct((rows, 4), jnp.float32)
    program = export.export(step)(jnp.ones((4, 3)), state, x)
    assert "max_grad" not in str(program.out_avals)
    if importlib.util.find_spec("flatbuffers"):
        program = export.deserialize(program.serialize())
    after = program.call(jnp.ones((4, 3)), state, jnp.full((5, 4), 5.0))
    np.testing.assert_array_equal(after["input_amax_history"], [5, 0, 0])
    assert jax_layers.newest(after) == 5
