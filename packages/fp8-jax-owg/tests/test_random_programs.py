"""Random compositions of transforms around layers: every state records what running the program step by step does.

20 programs, with --full 300 that nest deeper; each in one of the two modes, with its states handed over in one of
several forms.
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax import nnx

import fp8_jax_owg as owg
from fp8_jax_owg import nnx as owg_nnx
from tests.helpers import jax_programs

BOTH = nnx.Any(nnx.Param, owg_nnx.OverwriteWithGradient)
MODES = ("extended", "fan_out")
FORMS = ("collection", "marks", "bare argument", "linen", "nnx", "nnx state", "bridge")


def pytest_generate_tests(metafunc):
    programs = 300 if metafunc.config.getoption("full") else 20
    metafunc.parametrize("seed", range(programs))


class Held(nn.Module):
    """States in a Linen module."""

    program: object
    states: dict

    @nn.compact
    def __call__(self, h):
        held = {name: self.variable("_overwrite_with_gradient", name, dict, meta).value for name, meta in self.states}
        return self.program.trace(h, held)


class HeldByNnx(nnx.Module):
    """States in an NNX module."""

    def __init__(self, states):
        self.states = nnx.data(jax.tree.map(owg_nnx.OverwriteWithGradient, states))


def differentiate(form, program, states, h):
    """The next states, by way of one of the forms in which states are handed over."""
    if form == "nnx":
        model = HeldByNnx(states)
        grads = jax.jit(
            lambda: owg_nnx.grad(lambda model: program.trace(h, read(model.states)).sum(), wrt=BOTH)(model)
        )()
        return nnx.to_pure_dict(grads)["states"]
    if form == "nnx state":
        graph, state = nnx.split(HeldByNnx(states))
        loss = lambda state: program.trace(h, read(nnx.merge(graph, state).states)).sum()  # noqa: E731
        return nnx.to_pure_dict(jax.jit(owg.grad(loss))(state))["states"]
    if form in ("linen", "bridge"):
        model = Held(program, tuple(states.items()))
        if form == "bridge":
            # jitted as a whole: operation by operation, every one is compiled for itself

            def bridged_grads():
                bridged = nnx.bridge.ToNNX(model, rngs=nnx.Rngs(0)).lazy_init(h)
                return nnx.to_pure_dict(owg_nnx.grad(lambda bridged: bridged(h).sum(), wrt=BOTH)(bridged))

            return jax.jit(bridged_grads)()
        variables = {"_overwrite_with_gradient": states}
        return jax.jit(owg.grad(lambda v: model.apply(v, h).sum()))(variables)["_overwrite_with_gradient"]
    if form == "collection":
        tree = {"_overwrite_with_gradient": states}
        return jax.jit(owg.grad(lambda t: program.trace(h, t["_overwrite_with_gradient"]).sum()))(tree)[
            "_overwrite_with_gradient"
        ]
    if form == "marks":
        tree = {"w": jnp.float32(1), "fp8": owg.Overwrite(states)}

        def loss(params, state):
            tree = owg.merge(params, state)
            return tree["w"] * program.trace(h, tree["fp8"].value).sum()

        return owg.merge(*jax.jit(owg.grad(loss, argnums=(0, 1)))(*owg.split(tree)))["fp8"].value
    return jax.jit(owg.grad(lambda w, s: w * program.trace(h, s).sum(), argnums=1))(jnp.float32(1), states)


def read(states):
    return jax.tree.map(lambda v: v[...], states, is_leaf=lambda v: isinstance(v, nnx.Variable))


def test_a_random_program_records_what_its_steps_see(seed, devices, full):
    mode, form = MODES[seed % 2], FORMS[seed % len(FORMS)]
    maker = jax_programs.Maker(seed, mode, deepest=3 if full else 2)
    program = maker.program()
    h = jax_programs.activations(seed)
    wanted = maker.recorded(program, h)
    with owg.use_mode(mode):
        after = differentiate(form, program, maker.states(), jnp.asarray(h)) if maker.shapes else {}
    after = maker.stacked(after)
    for name, seen in wanted.items():
        amax = np.maximum(seen, 0)
        np.testing.assert_array_equal(after[name]["input_amax_history"][..., 0], amax, err_msg=f"{name} in {program}")
        np.testing.assert_array_equal(after[name]["kernel_amax_history"][..., 0], np.float32(seen >= 0))
        np.testing.assert_array_equal(after[name]["input_scale"][..., 0], np.ones_like(amax))
