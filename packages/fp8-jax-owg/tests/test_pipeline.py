"""Pipelines equal their stages run one after the other; bubbles leave nothing; what stages may not do is refused."""

import inspect
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import errors, nnx
from flax import linen as nn
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import fp8_jax_owg as owg
import jax_layers
from fp8_common import Fp8Error, Fp8UnsupportedError
from fp8_jax_owg import linen as owg_linen
from fp8_jax_owg import nnx as owg_nnx
from fp8_jax_owg import pipeline
from fp8_jax_owg.pipeline import PipelineOptions, Schedule
from fp8_jax_owg.state import cotangents
from fp8_jax_owg.state.pairs import map_leaves
from jax_layers import COLLECTION, SCALING, T

WIDTH, ROWS = 8, 4
KEEP = jax.checkpoint_policies
REMAT = {
    "plain": {},
    "remat": {"remat": True},
    "except names": {"policy": KEEP.save_anything_except_these_names("none")},
}


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


def linen(body, stages, batches, rounds=1, policy=None, **options):
    """A pipeline of Linen."""
    numbers = {"num_stages": stages, "num_microbatches": batches, "circular_repeat": rounds, "remat_policy": policy}
    return owg_linen.LayerwiseShardablePipelined(body=body, **numbers, **options)


class Linen:
    """A pipeline of `LinenStage` behind the interface that the tests use."""

    def __init__(self, stages, batches, rounds, bias=0.0, **options):
        model = linen(LinenStage(bias), stages, batches, rounds, **options)
        self.variables = filled(jax.eval_shape(model.init, jax.random.key(1), microbatches(batches)), bias)
        self.run, self.stage = model.apply, LinenStage(bias).apply

    def body(self, variables):
        return {name: tree["body"] for name, tree in variables.items()}


class Nnx:
    """The same for NNX."""

    def __init__(self, stages, batches, rounds, bias=0.0, **options):
        settings = {"circular_repeat": rounds, "options": PipelineOptions(**options)}
        make = partial(owg_nnx.LayerwiseShardablePipelined, partial(NnxStage, bias=bias), stages, batches, **settings)
        model = nnx.eval_shape(lambda: make(rngs=nnx.Rngs(1)))
        graph, shapes = nnx.split(model)
        stage = nnx.graphdef(model.stages)
        self.variables = filled(shapes, bias)
        self.run = lambda variables, x: nnx.merge(graph, variables)(x)
        self.stage = lambda variables, h: nnx.merge(stage, variables)(h)

    def body(self, variables):
        return variables["stages"]


def filled(shapes, bias):
    """Numbers for kernels, `bias` for biases, and a state before its first step; nothing is compiled for it."""
    random = np.random.default_rng(1)

    def parameter(leaf):
        drawn = random.normal(size=leaf.shape) / WIDTH**0.5
        return jnp.asarray(drawn if leaf.shape[-2:] == (WIDTH, WIDTH) else np.full(leaf.shape, bias), jnp.float32)

    return map_leaves(parameter, lambda leaf: jnp.full(leaf.shape, leaf.shape[-1] == 1, jnp.float32), shapes)


def microbatches(count, scale=1.0):
    """Microbatches of different amax, the greatest not the last."""
    x = np.random.default_rng(0).normal(size=(count, ROWS, WIDTH)) * scale
    return jnp.asarray(x * np.resize([1.0, 3.0, 2.0, 0.5], (count, 1, 1)), jnp.float32)


def with_history(variables):
    """The variables after some steps: every history holds numbers, so every scale is another one."""
    random = np.random.default_rng(2)
    return map_leaves(lambda x: x, lambda x: jnp.asarray(random.uniform(0.5, 4, x.shape), jnp.float32), variables)


def loss_of(y):
    return (y * y).sum() / 64, y


def sequential(pipe, rounds, variables, x):
    """Each microbatch through one stage after the other; sums and maxima over microbatches."""

    def one(variables, h):
        # every layer is used once, so a loop over them combines nothing
        lead = 2 if rounds > 1 else 1
        layers = T(lambda a: a.reshape(-1, *a.shape[lead:]), owg.state.unshare(pipe.body(variables)))
        return loss_of(jax.lax.scan(lambda h, stage: (pipe.stage(stage, h), None), h, layers)[0])

    step = owg.value_and_grad(one, has_aux=True)
    (_, outputs), each = jax.jit(lambda v, x: jax.lax.map(lambda h: step(v, h), x))(variables, x)
    return outputs, map_leaves(lambda g: g.sum(0), lambda g: cotangents.maximum_over(g, 0), each)


def assert_equal(pipe, rounds, variables, x):
    both = jax.jit(owg.value_and_grad(lambda v: loss_of(pipe.run(v, x)), has_aux=True))
    (_, y), gradients = both(variables)
    wanted, total = sequential(pipe, rounds, variables, x)
    np.testing.assert_allclose(y, wanted, rtol=2e-6, atol=1e-6)
    (parameters, state), (wanted_parameters, wanted_state) = owg.tree.split(gradients), owg.tree.split(total)
    assert len(jax.tree.leaves(state)) == 6
    # one and more stages are multiplied in sums of another order: an amax of what they return differs in the last bit
    T(partial(np.testing.assert_allclose, rtol=1e-6), state, wanted_state)
    T(partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), parameters, wanted_parameters)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradients))


KINDS = {"linen": Linen, "nnx": Nnx}


@pytest.mark.matrix(
    "each", stages=[1, 2, 4], batches=[1, 3, 8], rounds=[1, 2], remat=list(REMAT), kind=["linen", "nnx"]
)
def test_a_pipeline_equals_its_stages(stages, batches, rounds, remat, kind):
    pipe = KINDS[kind](stages, batches, rounds, **REMAT[remat])
    assert_equal(pipe, rounds, with_history(pipe.variables), microbatches(batches))


@pytest.mark.matrix("each", kind=["linen", "nnx"], constant=[1e6, np.nan], rounds=[1, 2], remat=["plain", "remat"])
def test_nothing_leaves_a_bubble(kind, constant, rounds, remat, monkeypatch):
    """Neither NaN, nor what is far above the microbatches, nor a bias that is."""
    monkeypatch.setattr(pipeline, "BUBBLE", constant)
    pipe = KINDS[kind](3, 2, rounds, bias=300.0, **REMAT[remat])
    assert_equal(pipe, rounds, pipe.variables, microbatches(2, scale=0.01))


# ---------------------------------------------------------------- one FP8 layer a stage


def layer(width=WIDTH):
    return jax_layers.dense(width, use_bias=False, scaling=SCALING)


def test_three_steps_give_the_known_histories_and_scales():
    """One stage, three microbatches of 2, 3, 4, and a stock gradient: the figures of praxis' test of its pipeline."""
    model = linen(layer(1), 1, 3)
    variables = jax.jit(model.init)(jax.random.key(0), jnp.ones((3, 1, 1)))

    @jax.jit
    def step(variables, x):
        gradients = jax.grad(lambda v: model.apply(v, x).max())(variables)
        return owg.tree.next_state(variables, gradients) | {"params": variables["params"]}

    histories, scales = [], []
    for value in (2.0, 3.0, 4.0):
        variables = step(variables, jnp.full((3, 1, 1), value))
        (state,) = variables[COLLECTION]["body"].values()
        histories.append(np.asarray(state["input_amax_history"]).tolist())
        scales.append(float(state["input_scale"][0, 0]))
    assert histories == [[[2, 0, 0]], [[3, 0, 2]], [[4, 2, 3]]]
    np.testing.assert_allclose(scales, [1.0, 2 / 448, 3 / 448], rtol=1e-7)


def test_no_dots_are_added():
    """One product forward and two backward, as without a pipeline; what is recomputed needs none."""
    model, x = linen(layer(), 2, 4, remat=True), microbatches(4)
    assert inspect.signature(model.apply) == inspect.signature(nn.Dense(1).apply)
    variables = jax.eval_shape(model.init, jax.random.key(0), x)
    zeros = T(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), variables)
    assert len(owg.testing.assert_fp8_dots(jax.grad(lambda v: (model.apply(v, x) ** 2).sum()), zeros)) == 3


def test_sharded_over_stages_and_data_equals_one_device(devices):
    """Loss normalised by the global count; data whose sums are exact."""
    mesh = jax_layers.mesh(2, 4)
    x = jnp.asarray(np.random.default_rng(0).integers(-4, 5, (3, 8, WIDTH)), jnp.float32)
    integers = np.random.default_rng(1).integers(-2, 3, (2, WIDTH, WIDTH)).astype(np.float32)
    model = linen(layer(), 2, 3)
    shapes = jax.eval_shape(model.init, jax.random.key(0), x)
    variables = map_leaves(lambda _: jnp.asarray(integers), lambda leaf: jnp.ones(leaf.shape), shapes)

    def step(model):
        return jax.jit(owg.grad(lambda v, x: (model.apply(v, x) ** 2).sum() / x.size))

    single = step(model)(variables, x)
    with jax.set_mesh(mesh):
        placed = jax.device_put(variables, NamedSharding(mesh, P("a")))
        spread = jax.device_put(x, NamedSharding(mesh, P(None, "b")))
        compiled = step(model.clone(stage_axis="a")).lower(placed, spread).compile()
        several = compiled(placed, spread)
    T(np.testing.assert_array_equal, several, single)
    assert "collective-permute" in compiled.as_text()


def test_random_numbers_differ_between_stages_and_microbatches():
    class Noisy(nn.Module):
        @nn.compact
        def __call__(self, h):
            return nn.Dropout(0.5, deterministic=False)(h) + self.param("zero", nn.initializers.zeros, ())

    model, x = linen(Noisy(), 2, 3), jnp.ones((3, 4, 64))
    run = jax.jit(
        lambda: model.apply({"params": {"body": {"zero": jnp.zeros(2)}}}, x, rngs={"dropout": jax.random.key(2)})
    )
    y = run()
    assert len({row.tobytes() for row in np.asarray(y).reshape(12, -1)}) == 12
    np.testing.assert_array_equal(y, run())


def test_partitioned_parameters_name_the_new_axes():
    class Partitioned(nn.Module):
        @nn.compact
        def __call__(self, h):
            init = nn.with_partitioning(nn.initializers.lecun_normal(), (None, "model"))
            return h + jax_layers.dense(WIDTH, kernel_init=init, scaling=SCALING, name="fc")(h)

    model, x = linen(Partitioned(), 2, 2, 3), microbatches(2)
    variables = jax.jit(model.init)(jax.random.key(0), x)
    specs = nn.get_partition_spec(variables)
    assert specs["params"]["body"]["fc"]["kernel"] == P("round", "stage", None, "model")
    shapes = [jax.eval_shape(model.apply, v, x) for v in (variables, nn.meta.unbox(variables))]
    assert shapes[0].shape == shapes[1].shape == x.shape


# ---------------------------------------------------------------- what is refused


def run_linen(*args):
    return lambda: linen(*args).init(jax.random.key(0), jnp.ones((2, 4, WIDTH)))


def run_of_other_stages():
    return pipeline.pipeline(
        lambda v, h, k: h, {"w": jnp.ones((3, 1))}, jnp.ones((2, 1)), Schedule(stages=2, microbatches=2)
    )


FLAX_LAYER = nn.Dense(2, use_bias=False, dot_general_cls=nn.Fp8DirectDotGeneralOp)
REFUSED = {
    "no stages": (run_linen(layer(), 0, 2), "stages of a pipeline must be an integer from 1 on, got 0"),
    "other microbatches": (
        run_linen(layer(), 2, 3),
        r"Activations .*\[microbatches, \.\.\.\] with \(3,\), got \(2, 4, 8\)",
    ),
    "other stages": (run_of_other_stages, r"Variables .*\[stages, \.\.\.\] with \(2,\), got \(3, 1\) at \['w'\]"),
    "FP8 layers of flax, which would compute with state": (
        run_linen(FLAX_LAYER, 2, 2),
        r"flax's own FP8 operations cannot read state.*pipelines",
    ),
}


@pytest.mark.parametrize(("run", "message"), REFUSED.values(), ids=REFUSED)
def test_what_does_not_fit_raises(run, message):
    with pytest.raises(Fp8Error, match=message):
        run()


def initialized(body, *rounds):
    model, x = linen(body, 2, 3, *rounds), jnp.ones((3, 2, 4))
    return model, jax.jit(model.init)(jax.random.key(0), x), x


def test_batch_statistics_in_linen_raise_unless_they_are_fixed():
    with pytest.raises(Fp8UnsupportedError, match=r"sow, here \['batch_stats'\].*\['mean'\].*Move the layer"):
        initialized(nn.BatchNorm(use_running_average=False), 2)
    model, variables, x = initialized(nn.BatchNorm(use_running_average=True), 2)
    _, after = model.apply(variables, x, mutable=["batch_stats"])
    T(np.testing.assert_array_equal, after["batch_stats"], variables["batch_stats"])
    assert not model.apply(variables, x, mutable=["intermediates"])[1]
    changing = model.clone(body=nn.BatchNorm(use_running_average=False))
    with pytest.raises(Fp8UnsupportedError, match="batch_stats"):
        changing.apply(variables, x, mutable=["batch_stats"])
    with pytest.raises(errors.ModifyScopeVariableError, match="batch_stats"):
        changing.apply(variables, x)


class NnxSowing(nnx.Module):
    def __call__(self, h):
        self.sow(nnx.Intermediate, "seen", h)
        return h


CHANGING = {
    "mean": lambda rngs: nnx.BatchNorm(4, rngs=rngs),
    "count": lambda rngs: nnx.Dropout(0.5, rngs=rngs),
    "seen": lambda rngs: NnxSowing(),
}


@pytest.mark.filterwarnings("ignore:Using 'Module.sow:DeprecationWarning")
@pytest.mark.parametrize("name", CHANGING)
def test_stages_that_change_in_nnx(name):
    pipe = owg_nnx.LayerwiseShardablePipelined(CHANGING[name], 2, 3, rngs=nnx.Rngs(0))
    with pytest.raises(Fp8UnsupportedError, match=rf"does not keep variables that its stages change or sow, .*{name}"):
        pipe(jnp.ones((3, 2, 4)))
