"""Casts and next states are one equation each in traced programs, with the bits of what they stand for."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fp8_jax_owg as owg
from fp8_common import Fp8UnsupportedError
from fp8_common.testing import assert_same_bits
from fp8_jax_owg import _one_equation

DIMS = (((1,), (0,)), ((), ()))
MATRIX, KERNEL = (16, 32), (32, 8)


def example():
    """Return an input, a kernel and a state whose histories hold something."""
    keys = jax.random.split(jax.random.key(0), 3)
    state = owg.init_meta(owg.DelayedScaling(amax_history_length=4))
    state |= {name: x + 3 for name, x in state.items() if name.endswith("history")}
    return jax.random.normal(keys[0], MATRIX), jax.random.normal(keys[1], KERNEL), state


def product(x, kernel, state):
    return jnp.square(owg.fp8_dot_general(x, kernel, DIMS, meta=state)).sum()


def looped(x, kernel, state):
    def body(h, _):
        return h + owg.fp8_dot_general(h, kernel, DIMS, meta=state) @ kernel.T, None

    return jnp.square(jax.lax.scan(jax.checkpoint(body), x, None, 1)[0]).sum()


def over_examples(x, kernel, state):
    return jax.vmap(product, (0, None, None))(x.reshape(4, 4, 32), kernel, state).sum()


@pytest.mark.parametrize("loss", [product, looped, over_examples])
def test_the_bits_are_those_of_the_functions(loss, monkeypatch):
    given = example()

    def results():
        # a function of its own, so that nothing traced before is taken
        return jax.jit(lambda *args: jax.grad(loss, (0, 1, 2))(*args))(*given)

    one = results()
    monkeypatch.setattr(_one_equation, "_types_tell_more", lambda: True)
    jax.clear_caches()
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(results()), strict=True):
        assert_same_bits(np.asarray(a), np.asarray(b))


def test_a_gradient_has_an_equation_for_each_cast_and_one_for_the_next_state():
    program = jax.make_jaxpr(jax.grad(product, (0, 1, 2)))(*example())
    names = [equation.primitive.name for equation in program.jaxpr.eqns]
    assert names.count("fp8_cast") == 3
    assert names.count("fp8_observe") == 1


def test_a_state_that_examples_share_gets_one_maximum():
    x, kernel, state = example()
    observed = jax.jit(owg.grad(over_examples, 2))(x, kernel, state)["input_amax_history"]
    assert float(observed[0]) == float(jnp.abs(x).max())


def test_a_second_derivative_of_a_state_alone_is_refused():
    x, kernel, state = example()
    inner = jax.grad(lambda x, state: product(x, kernel, state))
    with pytest.raises(Fp8UnsupportedError, match="first derivatives only"):
        jax.grad(lambda state: inner(x, state).sum())(state)


def test_a_call_stays_one_equation_under_nested_vmaps_of_different_axes():
    def weighted(x, y):
        return jnp.cumsum(x) * 2 + y, y

    def mapped(function):
        inner = jax.vmap(function, in_axes=(1, None))
        return jax.vmap(inner, in_axes=(2, 0))

    once = _one_equation.as_one_equation("weighted", jax.jit(weighted))
    x, y = jnp.arange(60.0).reshape(3, 4, 5), jnp.arange(5.0)
    found, expected = jax.jit(mapped(once))(x, y), mapped(weighted)(x, y)
    assert all(a.shape == b.shape and (a == b).all() for a, b in zip(found, expected, strict=True))
    names = [equation.primitive.name for equation in jax.make_jaxpr(mapped(once))(x, y).jaxpr.eqns]
    assert names.count("weighted") == 1
    assert "cumsum" not in names
    assert not any("jit" in name for name in names)
