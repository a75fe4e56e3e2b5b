"""Pipelines equal their stages run one after the other: results, gradients and every leaf of the FP8 state."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

import fp8_jax_owg as owg
from fp8_jax_owg import DelayedScaling, pipeline
from fp8_jax_owg import linen as owg_linen
from fp8_jax_owg import nnx as owg_nnx
from fp8_jax_owg.pipeline import PipelineOptions, Schedule
from fp8_jax_owg.state import cotangents
from fp8_jax_owg.state.pairs import map_leaves
from tests.helpers import jax_layers

SCALING = DelayedScaling(amax_history_length=3)
WIDTH, ROWS = 8, 4


class LinenStage(nn.Module):
    """One dense layer between nonlinearities; `bias` is what bubbles would spread."""

    bias: float = 0.0

    @nn.compact
    def __call__(self, h):
        init = nn.initializers.constant(self.bias)
        return jnp.tanh(jax_layers.dense(WIDTH, scaling=SCALING, bias_init=init, name="fc")(h)) * 2 + h


class NnxStage(nnx.Module):
    def __init__(self, rngs, bias=0.0):
        init = nnx.initializers.constant(bias)
        self.fc = jax_layers.linear(WIDTH, WIDTH, scaling=SCALING, bias_init=init, rngs=rngs)

    def __call__(self, h):
        return jnp.tanh(self.fc(h)) * 2 + h


class Linen:
    """A Linen pipeline behind the interface that the tests use."""

    def __init__(self, schedule, bias=0.0, **options):
        stage = LinenStage(bias)
        numbers = {"num_stages": schedule.stages, "num_microbatches": schedule.microbatches}
        numbers["circular_repeat"] = schedule.rounds
        self.model = owg_linen.LayerwiseShardablePipelined(body=stage, **numbers, **options)
        shapes = jax.eval_shape(self.model.init, jax.random.key(1), microbatches(schedule))
        self.variables = filled(shapes, bias)
        self.stage = stage.apply

    def run(self, variables, x):
        return self.model.apply(variables, x)

    def body(self, variables):
        return {name: tree["body"] for name, tree in variables.items()}


class Nnx:
    """The same for NNX."""

    def __init__(self, schedule, bias=0.0, remat=False):
        make = partial(NnxStage, bias=bias)
        options = PipelineOptions(remat=remat)
        rounds = {"circular_repeat": schedule.rounds} if schedule.rounds > 1 else {}
        kind = owg_nnx.LayerwiseShardablePipelined
        numbers = schedule.stages, schedule.microbatches
        model = nnx.eval_shape(lambda: kind(make, *numbers, **rounds, rngs=nnx.Rngs(1), options=options))
        self.graph, shapes = nnx.split(model)
        self.variables = filled(shapes, bias)
        self.stage_graph = nnx.graphdef(model.stages)

    def run(self, variables, x):
        return nnx.merge(self.graph, variables)(x)

    def stage(self, variables, h):
        return nnx.merge(self.stage_graph, variables)(h)

    def body(self, variables):
        return variables["stages"]


def filled(shapes, bias):
    """Numbers for kernels, `bias` for biases, and a state before its first step; nothing is compiled for it."""
    random = np.random.default_rng(1)

    def parameter(leaf):
        drawn = random.normal(size=leaf.shape) / WIDTH**0.5
        return jnp.asarray(drawn if leaf.shape[-2:] == (WIDTH, WIDTH) else np.full(leaf.shape, bias), jnp.float32)

    def fresh(leaf):
        return jnp.full(leaf.shape, leaf.shape[-1] == 1, jnp.float32)

    return map_leaves(parameter, fresh, shapes)


def microbatches(schedule, seed=0, scale=1.0):
    x = np.random.default_rng(seed).normal(size=(schedule.microbatches, ROWS, WIDTH)) * scale
    # microbatches of different amax, the greatest not the last
    return jnp.asarray(x * np.resize([1.0, 3.0, 2.0, 0.5], (schedule.microbatches, 1, 1)), jnp.float32)


def with_history(variables):
    """The variables after some steps: every history holds numbers, so every scale is another one."""
    random = np.random.default_rng(2)

    def fresh(x):
        return jnp.asarray(random.uniform(0.5, 4, x.shape), jnp.float32)

    return map_leaves(lambda x: x, fresh, variables)


def loss_of(y):
    return (y * y).sum() / 64


def sequential(pipe, schedule, variables, x):
    """Each microbatch through one stage after the other; sums and maxima over microbatches."""

    def one(variables, h):
        def layer(h, stage):
            return pipe.stage(stage, h), None

        # every layer is used once, so a loop over them combines nothing
        lead = 2 if schedule.rounds > 1 else 1
        layers = jax.tree.map(lambda a: a.reshape(-1, *a.shape[lead:]), owg.read(pipe.body(variables)))
        h = jax.lax.scan(layer, h, layers)[0]
        return loss_of(h), h

    step = owg.value_and_grad(one, has_aux=True)
    (_, outputs), each = jax.jit(lambda v, x: jax.lax.map(lambda h: step(v, h), x))(variables, x)
    return outputs, map_leaves(lambda g: g.sum(0), lambda g: cotangents.maximum_over(g, 0), each)


def pipelined(pipe, variables, x):
    def loss(variables):
        y = pipe.run(variables, x)
        return loss_of(y), y

    (_, y), gradients = jax.jit(owg.value_and_grad(loss, has_aux=True))(variables)
    return y, gradients


def assert_equal(pipe, schedule, variables, x):
    y, gradients = pipelined(pipe, variables, x)
    wanted, total = sequential(pipe, schedule, variables, x)
    np.testing.assert_allclose(y, wanted, rtol=2e-6, atol=1e-6)
    parameters, state = owg.split(gradients)
    wanted_parameters, wanted_state = owg.split(total)
    assert len(jax.tree.leaves(state)) == 6
    jax.tree.map(np.testing.assert_array_equal, state, wanted_state)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), parameters, wanted_parameters)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradients))
    return gradients


KINDS = {"linen": Linen, "nnx": Nnx}


@pytest.mark.matrix(
    "each",
    stages=[1, 2, 4],
    batches=[1, 3, 8],
    rounds=[1, 2],
    remat=[False, True],
    kind=["linen", "nnx"],
)
def test_a_pipeline_equals_its_stages(stages, batches, rounds, remat, kind):
    schedule = Schedule(stages=stages, microbatches=batches, rounds=rounds)
    pipe = KINDS[kind](schedule, remat=remat)
    assert_equal(pipe, schedule, with_history(pipe.variables), microbatches(schedule))


@pytest.mark.matrix(
    "each",
    kind=["linen", "nnx"],
    trouble=["nan", "1e6", "bias"],
    rounds=[1, 2],
    remat=[False, True],
)
def test_nothing_leaves_a_bubble(kind, trouble, rounds, remat, monkeypatch):
    schedule = Schedule(stages=3, microbatches=2, rounds=rounds)
    if trouble != "bias":
        monkeypatch.setattr(pipeline, "BUBBLE", float(trouble))
    pipe = KINDS[kind](schedule, remat=remat, bias=300.0 if trouble == "bias" else 0.0)
    assert_equal(pipe, schedule, pipe.variables, microbatches(schedule, scale=0.01))
