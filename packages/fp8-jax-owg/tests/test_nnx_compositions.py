"""Shared state under transforms of NNX, optimizers that know nothing of it, export, checkpoints, settings of JAX."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from flax.linen import fp8_ops
from jax import export, lax

import fp8_jax_owg as owg
from fp8_common import Fp8Error
from fp8_jax_owg import nnx as owg_nnx
from tests.helpers import jax_layers

BOTH = nnx.Any(nnx.Param, owg_nnx.OverwriteWithGradient)
SCALING = owg.DelayedScaling(amax_history_length=3)
MATMUL = (((1,), (0,)), ((), ()))
T = jax.tree.map


def inputs():
    """Four matrices with amax 1, 5, 3 and 2."""
    return jnp.float32([1, 5, 3, 2])[:, None, None] * jnp.ones((4, 2, 2), jnp.float32)


class Model(nnx.Module):
    def __init__(self):
        self.layer = jax_layers.linear(2, 2, use_bias=False, scaling=SCALING, rngs=nnx.Rngs(0))

    def __call__(self, x):
        return self.layer(x).sum()


def called(model, x):
    return model(x)


def in_pure_dictionaries(model):
    graph, state = nnx.split(model)

    def run(values, x):
        here = T(lambda leaf: leaf, state)
        nnx.replace_by_pure_dict(here, values)
        return nnx.merge(graph, here)(x)

    return sum(run(nnx.to_pure_dict(state), x) for x in inputs())


def split_and_merged(model):
    graph, params, rest = nnx.split(model, nnx.Param, ...)
    run = jax.checkpoint(lambda params, rest, x: nnx.merge(graph, params, rest)(x))
    return sum(run(params, rest, x) for x in inputs())


NNX = {
    "scan": lambda m: nnx.scan(lambda c, m, x: c + m(x), in_axes=(nnx.Carry, None, 0), out_axes=nnx.Carry)(
        jnp.float32(0), m, inputs()
    ),
    "vmap": lambda m: nnx.vmap(called, in_axes=(None, 0))(m, inputs()).sum(),
    "vmap with axes of state": lambda m: nnx.vmap(called, in_axes=(nnx.StateAxes({...: None}), 0))(m, inputs()).sum(),
    "remat": lambda m: sum(nnx.remat(called)(m, x) for x in inputs()),
    "jit": lambda m: sum(nnx.jit(called)(m, x) for x in inputs()),
    "cond": lambda m: sum(nnx.cond(x[0, 0] > 0, called, lambda m, x: jnp.float32(0), m, x) for x in inputs()),
    "switch": lambda m: sum(
        nnx.switch(jnp.int32(i % 2), [called, lambda m, x: 2 * m(x)], m, x) for i, x in enumerate(inputs())
    ),
    "fori_loop": lambda m: nnx.fori_loop(0, 4, lambda i, c: (c[0], c[1] + c[0](inputs()[i])), (m, jnp.float32(0)))[1],
    "split and merge": split_and_merged,
    "pure dictionaries": in_pure_dictionaries,
    "clone": lambda m: sum(nnx.clone(m)(x) for x in inputs()),
}


@pytest.mark.parametrize("how", NNX)
def test_transforms_of_nnx_combine(how):
    model = Model()
    nnx.jit(owg_nnx.grad(NNX[how]))(model)
    np.testing.assert_array_equal(model.layer.dot_general.input_amax_history[...], [5, 0, 0])


def test_what_is_cast_with_all_leaves_is_refused():
    def loss(model):
        graph, state = nnx.split(model)
        return nnx.merge(graph, T(lambda x: x.astype(jnp.bfloat16), state))(inputs()[0].astype(jnp.bfloat16))

    with pytest.raises(Fp8Error, match="must be float32, got bfloat16"):
        owg_nnx.grad(loss, wrt=BOTH)(Model())


def test_a_penalty_over_all_variables_is_nan():
    def penalized(*kinds):
        model = Model()
        squares = lambda m: sum((x**2).sum() for x in jax.tree.leaves(nnx.state(m, *kinds)))  # noqa: E731
        nnx.jit(owg_nnx.grad(lambda m: m(inputs()[1]) + squares(m)))(model)
        return model.layer.dot_general.input_amax_history[0]

    assert np.isnan(penalized())
    assert penalized(nnx.Param) == 5


def test_the_state_that_a_loss_returns_is_float32():
    both = owg_nnx.value_and_grad(lambda m: (m(inputs()[0]), nnx.state(m)), has_aux=True, wrt=BOTH)
    (_, returned), _ = both(Model())
    assert {leaf.dtype for leaf in jax.tree.leaves(returned)} == {jnp.dtype("float32")}


def variables():
    return {
        "w": jnp.eye(2, dtype=jnp.float32),
        "fc": owg.Overwrite(T(lambda leaf: leaf + 0.25, owg.init_meta(SCALING))),
    }


def loss(tree, xs):
    def body(carry, x, meta):
        return carry + owg.fp8_dot_general(x, tree["w"], MATMUL, meta=meta, scaling=SCALING).sum(), None

    return owg.scan(body, jnp.float32(0), xs, owg=tree["fc"].value)[0]


STOCK = {
    "gradients of several steps": lambda: optax.MultiSteps(optax.sgd(0.1), 2).gradient_transformation(),
    "updates that are finite": lambda: optax.apply_if_finite(optax.sgd(0.1), 5),
    "a rule for each label": lambda: optax.partition(
        {"train": optax.sgd(0.1), "freeze": optax.set_to_zero()},
        lambda tree: {"w": "train", "fc": T(lambda _: "freeze", tree["fc"])},
    ),
}


@pytest.mark.parametrize("how", STOCK)
def test_a_stock_optimizer_over_the_state_is_loud(how):
    optimizer, tree = STOCK[how](), variables()
    with jax.numpy_dtype_promotion("standard"):
        state = optimizer.init(tree)
        for _ in range(2):
            updates, state = optimizer.update(owg.grad(loss)(tree, inputs()), state, tree)
        after = owg.apply_updates(tree, updates)
    if how == "a rule for each label":  # which leaves the state alone: it is frozen, and the report says so
        assert all(one.stale for one in owg.report(after, tree).tensors)
    else:
        assert owg.report(after).suspicious
    added = optax.apply_updates(tree, updates)
    assert how == "a rule for each label" or owg.report(added).suspicious


def test_training_goes_on_from_a_checkpoint_bit_for_bit(tmp_path):
    @jax.jit
    def step(tree, x):
        grads = owg.grad(loss)(tree, x)
        return owg.apply_updates(tree, owg.map_parameters(lambda g: -0.01 * g, grads))

    tree = step(variables(), inputs())
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "saved", tree)
        checkpointer.wait_until_finished()
        again = checkpointer.restore(tmp_path / "saved", T(jnp.zeros_like, tree))
    for factor in (2, 3):
        tree, again = step(tree, factor * inputs()), step(again, factor * inputs())
    T(np.testing.assert_array_equal, tree, again)
    np.testing.assert_array_equal(np.sort(tree["fc"].value["input_amax_history"]), [5, 10, 15])


def test_an_exported_step_replaces_the_state():
    @jax.jit
    def step(w, meta, xs):
        tree = {"w": w, "fc": owg.Overwrite(meta)}
        return owg.next_state(tree, owg.grad(loss)(tree, xs))["fc"].value

    start = variables()
    program = export.export(step)(start["w"], start["fc"].value, inputs())
    if export_can_serialize():
        program = export.deserialize(program.serialize())
    after = program.call(start["w"], start["fc"].value, inputs())
    np.testing.assert_array_equal(after["input_amax_history"], [5, 0.25, 0.25])


def export_can_serialize():
    try:
        import flatbuffers  # noqa: F401
    except ModuleNotFoundError:
        return False
    return True


def moved(stack):
    """A gather, a repetition and slices, which are run equation by equation."""
    picked = T(lambda x: jnp.repeat(x[jnp.asarray([0, 1])], 2, axis=0), stack)
    layers = [T(lambda x: x[i], picked) for i in range(4)]  # noqa: B023 (called here)
    return sum(
        owg.fp8_dot_general(x, jnp.eye(2, dtype=jnp.float32), MATMUL, meta=meta, scaling=SCALING).sum()
        for x, meta in zip(inputs(), layers, strict=True)
    )


SETTINGS = {
    "jax_enable_x64": lambda: jax.enable_x64(True),
    "strict promotion": lambda: jax.numpy_dtype_promotion("strict"),
    "jax_disable_jit": lambda: jax.disable_jit(),
    "jax_debug_nans": lambda: jax.debug_nans(True),
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_settings_of_jax_change_nothing(setting, full):
    if setting == "strict promotion" and not full:
        pytest.skip("every test runs in it: run it with --full")
    with SETTINGS[setting]():
        jit = setting != "jax_disable_jit"
        once = jax_layers.after(lambda tree: loss(tree, inputs()), variables(), jit=jit)["fc"].value
        stack = T(lambda leaf: jnp.stack([leaf, leaf]), variables()["fc"])
        each = jax_layers.after(lambda tree: moved(tree["fc"].value), {"fc": stack}, jit=jit)["fc"].value
    np.testing.assert_array_equal(once["input_amax_history"], [5, 0.25, 0.25])
    np.testing.assert_array_equal(each["input_amax_history"], [[5, 0.25, 0.25], [3, 0.25, 0.25]])
    assert {leaf.dtype for leaf in jax.tree.leaves((once, each))} == {jnp.dtype("float32")}


def test_a_pipeline_that_converts_its_state_to_the_dtype_of_flax():
    """praxis' own: converted outside of the loop over time, stages under vmap, a stock gradient, and back behind it."""
    stages, microbatches = 2, jnp.float32([1, 5, 3])

    def stage(meta, x):
        return owg.fp8_einsum("bi,io->bo", x, jnp.eye(2), meta=meta, scaling=SCALING)

    def run(metas):
        shared = T(lambda leaf: lax.convert_element_type(leaf, fp8_ops.fm32), metas)

        def step(held, amax):
            held = jnp.roll(held, 1, axis=0).at[0].set(amax * jnp.ones((2, 2)))
            held = jax.vmap(stage)(shared, held)
            return held, held[-1].sum()

        fed = jnp.concatenate([microbatches, jnp.zeros(stages - 1)])
        return lax.scan(step, jnp.zeros((stages, 2, 2)), fed)[1].sum()

    metas = T(lambda leaf: jnp.stack([leaf] * stages), owg.init_meta(SCALING))
    after = jax.jit(jax.grad(run))(metas)
    np.testing.assert_array_equal(after["input_amax_history"][:, 0], [5, 5])
    np.testing.assert_array_equal(after["kernel_amax_history"][:, 0], [1, 1])
    np.testing.assert_array_equal(after["kernel_scale"], [[1], [1]])
