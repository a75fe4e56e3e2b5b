"""What a pipeline promises besides equal numbers: praxis' figures, sharding, four ways to find the state, no cost."""

import functools
import inspect
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import fp8_jax_owg as owg
from fp8_common import Fp8Error
from fp8_jax_owg import DelayedScaling, mask_from_hparams
from fp8_jax_owg import linen as owg_linen
from fp8_jax_owg.pipeline import Schedule, pipeline
from fp8_jax_owg.state import cotangents
from tests.helpers import jax_layers

SCALING = DelayedScaling(amax_history_length=3)
WIDTH = 8
FROM_448 = [1.0, 2 / 448, 3 / 448]


class Dense(nn.Module):
    """One FP8 layer with its state in flax's collection."""

    width: int = WIDTH

    @nn.compact
    def __call__(self, h):
        return jax_layers.dense(self.width, use_bias=False, scaling=SCALING, name="fc")(h)


def test_three_steps_give_the_known_histories_and_scales():
    """One stage, three microbatches of 2, 3, 4: the figures of praxis' own test of its pipeline."""
    model = owg_linen.LayerwiseShardablePipelined(body=Dense(1), num_stages=1, num_microbatches=3)
    variables = jax.jit(model.init)(jax.random.key(0), jnp.ones((3, 1, 1)))
    step = jax.jit(
        lambda v, x: owg.apply_updates(
            v, owg.map_parameters(lambda g: 0 * g, owg.grad(lambda v: model.apply(v, x).max())(v))
        )
    )
    histories, scales = [], []
    for value in (2.0, 3.0, 4.0):
        variables = step(variables, jnp.full((3, 1, 1), value))
        (state,) = variables["_overwrite_with_gradient"]["body"]["fc"].values()
        histories.append(np.asarray(state["input_amax_history"]).tolist())
        scales.append(float(state["input_scale"][0, 0]))
    assert histories == [[[2, 0, 0]], [[3, 0, 2]], [[4, 2, 3]]]
    np.testing.assert_allclose(scales, FROM_448, rtol=1e-7)


def data(microbatches, rows=4):
    x = np.random.default_rng(0).normal(size=(microbatches, rows, WIDTH))
    return jnp.asarray(x * np.resize([1.0, 3.0, 2.0, 0.5], (microbatches, 1, 1)), jnp.float32)


def reference(body, variables, x):
    """The input amax of each stage, one microbatch after the other."""
    seen, apply = np.zeros(2), jax.jit(body.apply)
    for h in x:
        for s in range(2):
            seen[s] = max(seen[s], float(jnp.abs(h).max()))
            h = apply(jax.tree.map(lambda a, s=s: a[s], variables), h)
    return seen


def newest(gradients):
    found = jax.tree_util.tree_leaves_with_path(gradients)
    return next(leaf for path, leaf in found if "input_amax_history" in jax.tree_util.keystr(path))[:, 0]


def stacked(variables):
    return nn.meta.unbox({name: tree["body"] for name, tree in variables.items()})


@pytest.mark.parametrize("way", ["collection", "top"])
def test_the_state_is_found_by_its_collection_or_because_it_is_shared(way):
    model = owg_linen.LayerwiseShardablePipelined(body=Dense(), num_stages=2, num_microbatches=4)
    x = data(4)
    variables = jax.jit(model.init)(jax.random.key(0), x)
    wanted = reference(Dense(), stacked(variables), x)
    grad = owg.grad if way == "top" else jax.grad
    gradients = jax.jit(grad(lambda v: (model.apply(v, x) ** 2).sum()))(variables)
    found = np.asarray(cotangents.decode(newest(nn.meta.unbox(gradients))))
    np.testing.assert_array_equal(found, wanted.astype(np.float32))


def test_without_the_pipelines_help_the_same_loop_adds_up():
    """The hazard that the pipeline is there for."""
    model = owg_linen.LayerwiseShardablePipelined(body=Dense(), num_stages=2, num_microbatches=4)
    x = data(4)
    variables = stacked(jax.jit(model.init)(jax.random.key(0), x))
    wanted = reference(Dense(), variables, x)

    def loss(variables):
        def body(h, t):
            out = jax.vmap(Dense().apply)(variables, h.at[0].set(x[jnp.minimum(t, 3)]))
            return jnp.roll(out, 1, 0), out[-1]

        return (jax.lax.scan(body, jnp.zeros((2, 4, WIDTH)), jnp.arange(5))[1] ** 2).sum()

    found = np.asarray(newest(jax.jit(jax.grad(loss))(variables)))
    assert (found > 1.2 * wanted).all()


def test_scales_of_flax_layers_grow_in_a_plain_pipeline_and_ours_stay():
    """Six steps of flax's own operation in a loop over time around `vmap` over stages, and of ours in the pipeline."""

    def layer(op):
        cls, orthogonal = functools.partial(op, amax_history_length=16), nn.initializers.orthogonal()
        return nn.Dense(WIDTH, use_bias=False, dot_general_cls=cls, kernel_init=orthogonal, name="fc")

    theirs, ours = layer(nn.Fp8DirectDotGeneralOp), layer(owg_linen.Fp8DirectDotGeneralOp)
    pipe = owg_linen.LayerwiseShardablePipelined(body=ours, num_stages=2, num_microbatches=4)
    x = data(4)

    def plain(variables):
        def body(h, t):
            out = jax.vmap(theirs.apply)(variables, h.at[0].set(x[jnp.minimum(t, 3)]))
            return jnp.roll(out, 1, 0), out[-1]

        return (jax.lax.scan(body, jnp.zeros((2, 4, WIDTH)), jnp.arange(5))[1][1:] ** 2).mean()

    collection = "_overwrite_with_gradient"
    one = jax.vmap(lambda key: theirs.init(key, x[0]))(jax.random.split(jax.random.key(0)))
    two = {name: {"body": tree} for name, tree in one.items()}
    step = jax.jit(lambda v: v | {collection: jax.grad(plain)(v)[collection]})

    def own(variables):
        after = jax_layers.after(lambda v: (pipe.apply(v, x) ** 2).mean(), variables)
        return variables | {collection: after[collection]}

    for _ in range(6):
        one, two = step(one), own(two)
    found = [
        next(a for path, a in jax.tree_util.tree_leaves_with_path(tree) if "input_scale" in jax.tree_util.keystr(path))
        for tree in (one, two)
    ]
    assert (found[0] > 50).all()  # five times as large in each step
    np.testing.assert_allclose(found[1].ravel()[0], np.abs(x).max() / 448, rtol=1e-6)
    assert "SUM instead of MAX" in owg.report(one).suspicious[0].suspicion
    assert not owg.report(two).suspicious


def test_praxis_like_metadata():
    """Parameters in one plain tree, marks in a tree of hyperparameters beside it."""
    marks = {"kernel": ()} | dict.fromkeys(owg.init_meta(SCALING), ("non_trainable", "_overwrite_with_gradient"))
    hparams = {name: SimpleNamespace(shape=None, collections=names) for name, names in marks.items()}
    mask = mask_from_hparams(hparams)
    assert mask == {name: name != "kernel" for name in marks}
    x = data(3)
    kernel = jnp.asarray(np.random.default_rng(1).normal(size=(2, WIDTH, WIDTH)), jnp.float32)
    meta = jax.tree.map(lambda leaf: jnp.stack([leaf] * 2), owg.init_meta(SCALING))
    marked = owg.mark({"kernel": kernel, **meta}, mask)

    def stage(params, h, key):
        meta = {name: leaf for name, leaf in params.items() if name != "kernel"}
        dims = (((h.ndim - 1,), (0,)), ((), ()))
        return owg.fp8_dot_general(h, params["kernel"], dims, meta=meta, scaling=SCALING)

    def loss(tree):
        params = owg.unmark(tree)
        return (pipeline(stage, params, x, Schedule(stages=2, microbatches=3)) ** 2).sum()

    gradients = owg.unmark(jax.jit(owg.grad(loss))(marked))
    assert newest(gradients)[0] == np.abs(x).max()
    assert gradients["kernel"].shape == kernel.shape


def test_the_signature_of_apply_stays():
    model = owg_linen.LayerwiseShardablePipelined(body=Dense(), num_stages=2, num_microbatches=2)
    assert inspect.signature(model.apply) == inspect.signature(nn.Dense(1).apply)
    assert list(inspect.signature(type(model).__call__).parameters) == ["self", "x"]


@pytest.mark.parametrize("remat", [False, True])
def test_no_dots_are_added(remat):
    """One product forward and two backward, as without a pipeline; what is recomputed needs none."""
    model = owg_linen.LayerwiseShardablePipelined(body=Dense(), num_stages=2, num_microbatches=4, remat=remat)
    x = data(4)
    variables = jax.eval_shape(model.init, jax.random.key(0), x)
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), variables)
    dots = owg.assert_fp8_dots(jax.grad(lambda v: (model.apply(v, x) ** 2).sum()), zeros)
    assert len(dots) == 3


def test_sharded_over_stages_and_data_equals_one_device(devices):
    """Loss normalised by the global count; data whose sums are exact."""
    mesh = jax.make_mesh((2, 4), ("stage", "data"), (jax.sharding.AxisType.Auto,) * 2, devices=devices)
    x = jnp.asarray(np.random.default_rng(0).integers(-4, 5, (3, 8, WIDTH)), jnp.float32)
    model = owg_linen.LayerwiseShardablePipelined(body=Dense(), num_stages=2, num_microbatches=3)
    variables = jax.jit(model.init)(jax.random.key(0), x)
    integers = np.random.default_rng(1).integers(-2, 3, (2, WIDTH, WIDTH)).astype(np.float32)
    variables["params"]["body"]["fc"]["kernel"] = jnp.asarray(integers)

    def loss(model):
        return jax.jit(owg.grad(lambda v, x: (model.apply(v, x) ** 2).sum() / x.size))

    single = loss(model)(variables, x)
    sharded_model = model.clone(stage_axis="stage")
    with jax.set_mesh(mesh):
        placed = jax.device_put(variables, NamedSharding(mesh, P("stage")))
        spread = jax.device_put(x, NamedSharding(mesh, P(None, "data")))
        compiled = loss(sharded_model).lower(placed, spread).compile()
        several = compiled(placed, spread)
    jax.tree.map(np.testing.assert_array_equal, several, single)
    assert "collective-permute" in compiled.as_text()


def test_scan_over_layers():
    """nn.scan stacks the state of layers; a loop over microbatches goes around it."""

    class Layers(nn.Module):
        @nn.compact
        def __call__(self, h):
            axes = {"params": 0, "_overwrite_with_gradient": 0}
            stack = nn.scan(
                lambda layer, h, _: (layer(h), None), variable_axes=axes, split_rngs={"params": True}, length=3
            )
            return stack(Dense(name="layer"), h, None)[0]

    model, x = Layers(), data(4)
    variables = jax.jit(model.init)(jax.random.key(0), x[0])

    def loss(variables):
        parameters, state = variables["params"], variables["_overwrite_with_gradient"]

        def body(total, h, state):
            return total + (model.apply({"params": parameters, "_overwrite_with_gradient": state}, h) ** 2).sum(), None

        return owg.scan(body, jnp.float32(0), x, owg=state)[0]

    gradients = jax.jit(owg.grad(loss))(variables)
    assert newest(gradients)[0] == np.abs(x).max()
    single = jax.jit(owg.grad(lambda v: (model.apply(v, x[1]) ** 2).sum()))(variables)
    assert (newest(gradients) >= newest(single)).all()


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ({"num_stages": 0, "num_microbatches": 2}, "stages of a pipeline must be an integer from 1 on, got 0"),
        (
            {"num_stages": 2, "num_microbatches": 3},
            r"Activations .* \[microbatches, \.\.\.\] with \(3,\), got \(2, 4, 8\)",
        ),
    ],
)
def test_wrong_numbers_are_refused(numbers, message):
    model = owg_linen.LayerwiseShardablePipelined(body=Dense(), **numbers)
    with pytest.raises(Fp8Error, match=message):
        model.init(jax.random.key(0), jnp.ones((2, 4, WIDTH)))


def test_stages_of_another_number_are_refused():
    with pytest.raises(Fp8Error, match=r"Variables .* \[stages, \.\.\.\] with \(2,\), got \(3, 1\) at \['w'\]"):
        pipeline(lambda v, h, k: h, {"w": jnp.ones((3, 1))}, jnp.ones((2, 1)), Schedule(stages=2, microbatches=2))


def test_random_numbers_differ_between_stages_and_microbatches():
    class Noisy(nn.Module):
        @nn.compact
        def __call__(self, h):
            return nn.Dropout(0.5, deterministic=False)(h) + self.param("zero", nn.initializers.zeros, ())

    model = owg_linen.LayerwiseShardablePipelined(body=Noisy(), num_stages=2, num_microbatches=3)
    x = jnp.ones((3, 4, 64))
    variables = jax.jit(model.init)({"params": jax.random.key(0), "dropout": jax.random.key(1)}, x)
    run = jax.jit(lambda: model.apply(variables, x, rngs={"dropout": jax.random.key(2)}))
    y = run()
    assert len({row.tobytes() for row in np.asarray(y).reshape(12, -1)}) == 12
    np.testing.assert_array_equal(y, run())


def test_partitioned_parameters_name_the_new_axes():
    class Partitioned(nn.Module):
        @nn.compact
        def __call__(self, h):
            init = nn.with_partitioning(nn.initializers.lecun_normal(), (None, "model"))
            return h + jax_layers.dense(WIDTH, kernel_init=init, scaling=SCALING, name="fc")(h)

    kind = owg_linen.LayerwiseShardablePipelined
    model = kind(body=Partitioned(), num_stages=2, num_microbatches=2, circular_repeat=3)
    x = data(2)
    variables = jax.jit(model.init)(jax.random.key(0), x)
    specs = nn.get_partition_spec(variables)
    assert specs["params"]["body"]["fc"]["kernel"] == P("round", "stage", None, "model")
    run = jax.jit(model.apply)
    np.testing.assert_array_equal(run(variables, x), run(nn.meta.unbox(variables), x))


def test_fp8_layers_of_flax_are_refused_in_one_sentence():
    """Stages hand state to each other that flax's operations would compute with."""
    body = nn.Dense(2, use_bias=False, dot_general_cls=nn.Fp8DirectDotGeneralOp)
    model = owg_linen.LayerwiseShardablePipelined(body=body, num_stages=2, num_microbatches=2)
    with pytest.raises(Fp8Error, match=r"flax's own FP8 operations cannot read state.*pipelines"):
        model.init(jax.random.key(0), jnp.ones((2, 3, 2)))
