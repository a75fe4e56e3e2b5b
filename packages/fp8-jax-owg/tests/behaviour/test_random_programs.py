"""Random compositions of transforms around layers: every state records what running the program step by step does.

14 programs, with --full 300 that nest deeper; the states of each are handed over in one of several forms, and one
program of three multiplies. As many programs move, select or compute with their states besides.
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax import nnx

import fp8_jax_owg as owg
import jax_layers
import jax_programs
from fp8_common import Fp8Error
from fp8_jax_owg import nnx as owg_nnx
from jax_layers import COLLECTION

FORMS = ("marks", "bare argument", "linen", "nnx", "nnx state", "bridge")


def pytest_generate_tests(metafunc):
    programs = 300 if metafunc.config.getoption("full") else 14
    metafunc.parametrize("seed", range(programs))


class Held(nn.Module):
    """States in a Linen module."""

    program: object
    states: dict

    @nn.compact
    def __call__(self, h):
        held = {name: self.variable(COLLECTION, name, dict, meta).value for name, meta in self.states}
        return self.program.trace(h, held)


class HeldByNnx(nnx.Module):
    """States in an NNX module."""

    def __init__(self, states):
        self.states = nnx.data(jax.tree.map(owg_nnx.OverwriteWithGradient, states))


def differentiate(form, program, states, h):
    """The next states, by way of one of the forms in which states are handed over."""
    if form == "nnx":
        model = HeldByNnx(states)
        nnx.jit(owg_nnx.grad(lambda model: program.trace(h, read(model.states)).sum()))(model)
        return nnx.to_pure_dict(nnx.state(model))["states"]
    if form == "nnx state":
        graph, state = nnx.split(HeldByNnx(states))
        loss = lambda state: program.trace(h, read(nnx.merge(graph, state).states)).sum()  # noqa: E731
        return nnx.to_pure_dict(jax_layers.after(loss, state))["states"]
    if form == "bridge":
        # jitted as a whole: operation by operation, every one is compiled for itself
        @jax.jit
        def bridged_states():
            bridged = nnx.bridge.ToNNX(Held(program, tuple(states.items())), rngs=nnx.Rngs(0)).lazy_init(h)
            owg_nnx.grad(lambda bridged: bridged(h).sum())(bridged)
            return nnx.to_pure_dict(nnx.state(bridged, owg_nnx.OverwriteWithGradient))

        return bridged_states()
    if form == "linen":
        model, variables = Held(program, tuple(states.items())), {COLLECTION: states}
        return jax_layers.after(lambda v: model.apply(v, h).sum(), variables)[COLLECTION]
    if form == "marks":
        tree = {"w": jnp.float32(1), "fp8": owg.tree.Overwrite(states)}

        def loss(params, state):
            tree = owg.tree.merge(params, state)
            return tree["w"] * program.trace(h, tree["fp8"].value).sum()

        found = owg.tree.merge(*jax.jit(owg.grad(loss, argnums=(0, 1)))(*owg.tree.split(tree)))
        return owg.tree.next_state(tree, found)["fp8"].value
    found = jax.jit(owg.grad(lambda w, s: w * program.trace(h, s).sum(), argnums=1))(jnp.float32(1), states)
    return owg.tree.next_state(states, found)


def read(states):
    return jax.tree.map(lambda v: v[...], states, is_leaf=lambda v: isinstance(v, nnx.Variable))


def check(form, program, maker, seed):
    """Compare the next states with what the steps of a program see."""
    h = jax_programs.activations(seed)
    wanted = maker.recorded(program, h)
    after = differentiate(form, program, maker.states(), jnp.asarray(h)) if maker.shapes else {}
    for name, seen in wanted.items():
        amax = np.maximum(seen, 0)
        np.testing.assert_array_equal(after[name]["input_amax_history"][..., 0], amax, err_msg=f"{name} in {program}")
        if maker.matmul:
            np.testing.assert_array_equal(after[name]["kernel_amax_history"][..., 0], np.float32(seen >= 0))
        np.testing.assert_array_equal(after[name]["input_scale"][..., 0], np.ones_like(amax))


def test_a_random_program_records_what_its_steps_see(seed, devices, full):
    maker = jax_programs.Maker(seed, deepest=3 if full else 2, matmul=seed % 3 == 0, native=seed % 4 > 0)
    check(FORMS[seed % len(FORMS)], maker.program(), maker, seed)


def test_a_random_program_that_operates_on_its_state_is_right_or_rejected(seed, devices, full):
    maker = jax_programs.Maker(10_000 + seed, deepest=3 if full else 2, matmul=seed % 3 == 0, operations=True)
    program = maker.program()
    try:
        check(FORMS[seed % len(FORMS)], program, maker, seed)
    # A bridge runs the program without a gradient first, where JAX speaks of state that the program shares.
    except (Fp8Error, ValueError, TypeError) as error:
        said = str(error)
    else:
        return  # Some operations compute with vectors alone, and leave the states of a stack as they are.
    assert maker.refused, program
    assert any(words in said for words in ("parameters alone", "fp8_jax_owg.state.read returns", "fp8_state")), said
