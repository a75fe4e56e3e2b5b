"""State in every form in which models and bridges hand it over: combined by MAX, or NaN; never added up in silence."""

import functools
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from flax.linen import fp8_ops
from jax.sharding import PartitionSpec as P

import fp8_jax_owg as owg
from fp8_common import Fp8Error
from fp8_jax_owg import DelayedScaling
from fp8_jax_owg import linen as owg_linen
from fp8_jax_owg import nnx as owg_nnx
from tests.helpers import jax_layers

SCALING = DelayedScaling(amax_history_length=2)
MATMUL = (((1,), (0,)), ((), ()))
COLLECTION = "_overwrite_with_gradient"


def inputs():
    """Four matrices with amax 1, 5, 3 and 2."""
    return jnp.float32([1, 5, 3, 2])[:, None, None] * jnp.ones((4, 2, 2))


def use(x, meta):
    return owg.fp8_dot_general(x, jnp.eye(2), MATMUL, meta=meta, scaling=SCALING).sum()


def newest(tree):
    """The newest amax of the input, wherever it is."""
    found = jax.tree_util.tree_leaves_with_path(tree)
    return float(next(leaf.ravel()[0] for path, leaf in found if "input_amax_history" in jax.tree_util.keystr(path)))


class Twice(nn.Module):
    """A Linen layer that is called four times."""

    @nn.compact
    def __call__(self, xs):
        layer = jax_layers.dense(2, use_bias=False, scaling=SCALING, name="fc")
        return sum(layer(x).sum() for x in xs)


def test_a_bridge_from_linen_gives_variables_that_are_known():
    model = nnx.bridge.ToNNX(Twice(), rngs=nnx.Rngs(0)).lazy_init(inputs())
    kinds = {type(v) for _, v in nnx.to_flat_state(nnx.state(model)) if "amax" in str(_)}
    assert kinds == {owg_nnx.OverwriteWithGradient}
    # frameworks look for the state by the name that the bridge gives its type
    assert {kind.__name__ for kind in kinds} == {COLLECTION}
    assert pickle.loads(pickle.dumps(owg_nnx.OverwriteWithGradient)) is owg_nnx.OverwriteWithGradient
    graph, state, rest = nnx.split(model, (nnx.Param, owg_nnx.OverwriteWithGradient), ...)
    gradient = owg.grad(lambda state: nnx.merge(graph, state, rest, copy=True)(inputs()))(state)
    assert newest(gradient) == 5
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    optimizer.update(model, owg_nnx.grad(lambda model: model(inputs()))(model))
    assert newest(nnx.state(model)) == 5


def test_variables_of_a_bridge_that_was_used_before_are_known_too():
    made_by_flax = type(COLLECTION, (nnx.Variable,), {})

    class Layer(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(jnp.eye(2))
            for name, value in owg.init_meta(SCALING).items():
                setattr(self, name, made_by_flax(value))

        def __call__(self, xs):
            meta = {name: getattr(self, name)[...] for name in owg.init_meta(SCALING)}
            return sum(owg.fp8_einsum("bi,io->bo", x, self.w[...], meta=meta, scaling=SCALING).sum() for x in xs)

    model = Layer()
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    optimizer.update(model, owg_nnx.grad(lambda model: model(inputs()))(model))
    assert newest(nnx.state(model)) == 5


def test_a_bridge_to_linen_keeps_the_collection():
    model = nnx.bridge.to_linen(jax_layers.linear, 2, 2, use_bias=False, scaling=SCALING)
    variables = model.init(jax.random.key(0), inputs()[0])
    assert COLLECTION in variables
    loss = lambda v: sum(model.apply(v, x).sum() for x in inputs())  # noqa: E731
    train = owg_linen.TrainState.create(apply_fn=model.apply, params=variables, tx=optax.sgd(0.1))
    after = train.apply_gradients(grads=owg.grad(loss)(variables)).params
    assert newest(after) == 5
    scales = [leaf for path, leaf in jax.tree_util.tree_leaves_with_path(after) if "scale" in str(path[-2:])]
    assert all((scale == 1).all() for scale in scales)


@pytest.mark.parametrize("form", ["bare collection", "bare state of one product", "list"])
def test_state_as_an_argument_of_its_own(form):
    meta = owg.init_meta(SCALING)
    state = {"bare collection": {"fc": {"op": meta}}, "bare state of one product": meta, "list": [meta, meta]}[form]

    def loss(w, state):
        one = {"bare collection": lambda: state["fc"]["op"], "list": lambda: state[0]}.get(form, lambda: state)()
        return w * owg.scan(lambda c, x, m: (c + use(x, m), None), jnp.float32(0), inputs(), owg=one)[0]

    _, after = jax.jit(owg.grad(loss, argnums=(0, 1)))(jnp.float32(1), state)
    assert newest(after) == 5
    assert owg.owg_mask(state) == jax.tree.map(lambda _: True, state)


def test_names_alone_make_no_state():
    tree = {"layer_scale": jnp.ones(1), "norm": {"scale": jnp.ones(3)}, "input_amax_history": jnp.zeros(2)}
    assert not any(jax.tree.leaves(owg.owg_mask(tree)))


T = jax.tree.map


def uses_of(m):
    return sum(use(x, m) for x in inputs())


FORMS = {
    "index": lambda m: sum(use(x, T(lambda a: a[0], m)) for x in inputs()),
    "dynamic index": lambda m: jax.lax.scan(
        lambda c, x: (c + use(x, T(lambda a: jax.lax.dynamic_index_in_dim(a, 0, 0, False), m)), None),
        jnp.float32(0),
        inputs(),
    )[0],
    "gather": lambda m: jax.vmap(use)(inputs(), T(lambda a: a[jnp.zeros(4, int)], m)).sum(),
    "take": lambda m: jax.vmap(use)(inputs(), T(lambda a: jnp.take(a, jnp.zeros(4, int), axis=0), m)).sum(),
    "broadcast": lambda m: jax.vmap(use)(inputs(), T(lambda a: jnp.broadcast_to(a[0], (4, *a[0].shape)), m)).sum(),
    "repeat": lambda m: jax.vmap(use)(inputs(), T(lambda a: jnp.repeat(a[:1], 4, axis=0), m)).sum(),
    "tile": lambda m: jax.vmap(use)(inputs(), T(lambda a: jnp.tile(a[:1], (4, 1)), m)).sum(),
    "stack": lambda m: jax.vmap(use)(inputs(), T(lambda a: jnp.stack([a[0]] * 4), m)).sum(),
    "concatenate": lambda m: jax.vmap(use)(inputs(), T(lambda a: jnp.concatenate([a[:1]] * 4), m)).sum(),
    "expand": lambda m: sum(use(x, T(lambda a: jnp.squeeze(jnp.expand_dims(a[0], 0), 0), m)) for x in inputs()),
    "astype": lambda m: sum(use(x, T(lambda a: a[0].astype(jnp.float32), m)) for x in inputs()),
    "multiply by one": lambda m: sum(use(x, T(lambda a: a[0] * 1, m)) for x in inputs()),
    "multiply once": lambda m: uses_of(T(lambda a: a[0] * 1, m)),
}


@pytest.mark.parametrize("form", FORMS)
def test_several_uses_of_changed_state_meet_by_max(form):
    tree = {"fc": owg.Overwrite(T(lambda a: jnp.stack([a] * 2), owg.init_meta(SCALING)))}
    step = jax.jit(owg.grad(lambda tree: FORMS[form](tree["fc"].value)))
    if form == "multiply once":  # JAX adds up what leaves a computation
        assert np.isnan(newest(owg.next_state(tree, step(tree))))
    else:
        assert newest(step(tree)) == 5


SINGLE = {
    "index": lambda m: T(lambda a: a[0], m),
    "slice": lambda m: T(lambda a: a[:1].reshape(-1), m),
    "astype": lambda m: T(lambda a: a[0].astype(jnp.float32), m),
    "expand": lambda m: T(lambda a: jnp.squeeze(jnp.expand_dims(a[0], 0), 0), m),
    "split": lambda m: T(lambda a: jnp.split(a, 2)[0][0], m),
}


@pytest.mark.parametrize("form", SINGLE)
def test_one_use_of_changed_state_is_right(form):
    tree = {"fc": owg.Overwrite(T(lambda a: jnp.stack([a] * 2), owg.init_meta(SCALING)))}
    after = jax_layers.after(lambda tree: use(inputs()[1], SINGLE[form](tree["fc"].value)), tree)["fc"].value
    np.testing.assert_array_equal(after["input_amax_history"], [[5, 0], [0, 0]])


def test_a_layer_of_flax_beside_one_of_ours_is_refused_in_one_sentence():
    class Half(nn.Module):
        @nn.compact
        def __call__(self, xs):
            ours = jax_layers.dense(2, use_bias=False, scaling=SCALING, name="ours")
            theirs = nn.Dense(
                2,
                use_bias=False,
                name="theirs",
                dot_general_cls=functools.partial(nn.Fp8DirectDotGeneralOp, amax_history_length=2),
            )
            return sum((ours(x) + theirs(x)).sum() for x in xs)

    model = Half()
    variables = model.init(jax.random.key(0), inputs())
    with pytest.raises(Fp8Error, match=r"flax's own FP8 operations cannot read state.*fp8_jax_owg.linen"):
        jax.jit(owg.grad(lambda v: model.apply(v, inputs())))(variables)


def test_what_flax_and_praxis_have_shared_is_taken():
    """praxis converts state to flax's dtype outside of its loop, and back behind it."""

    def loss(meta):
        shared = T(lambda a: jax.lax.convert_element_type(a, fp8_ops.fm32), meta)
        return jax.lax.scan(lambda c, x: (c + use(x, shared), None), jnp.float32(0), inputs())[0]

    assert owg.read(jax.lax.convert_element_type(jnp.ones(1), fp8_ops.fm32)).dtype == jnp.float32
    assert newest(jax.jit(jax.grad(loss))(owg.init_meta(SCALING))) == 5


def mesh_of(devices):
    return jax.make_mesh((2, 2), ("a", "b"), (jax.sharding.AxisType.Auto,) * 2, devices=devices[:4])


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("form", ["scan", "gate"])
def test_plain_loops_inside_shard_map(devices, check_vma, form):
    def local(meta, xs):
        meta = owg.replicated(meta, ("a", "b"))
        if form == "gate":
            first = use(xs[0], owg.gate(meta, jnp.bool_(False)))
            return jax.lax.psum(first + sum(use(x, meta) for x in xs), "a")
        return jax.lax.psum(jax.lax.scan(lambda c, x: (c, use(x, meta)), 0, xs)[1].sum(), "a")

    def loss(tree):
        meta = owg.read(tree["fc"].value)
        inside = jax.shard_map(
            local, mesh=mesh_of(devices), in_specs=(P(), P(None, "a")), out_specs=P(), check_vma=check_vma
        )
        return inside(meta, inputs())

    tree = {"fc": owg.Overwrite(owg.init_meta(SCALING))}
    after = jax_layers.after(loss, tree)["fc"].value
    np.testing.assert_array_equal(after["input_amax_history"], [5, 0])
    np.testing.assert_array_equal(after["input_scale"], [1])


READS = {
    "two calls": lambda m: use(inputs()[0], m) + use(inputs()[1], m),
    "plain scan": lambda m: jax.lax.scan(lambda c, x: (c + use(x, m), None), jnp.float32(0), inputs())[0],
    "remat and jit": lambda m: jax.checkpoint(use)(inputs()[0], m) + jax.jit(use)(inputs()[1], m),
}


@pytest.mark.parametrize("form", READS)
def test_what_was_read_once_and_is_used_twice_is_nan(form):
    tree = {"fc": owg.Overwrite(owg.init_meta(SCALING))}
    assert np.isnan(newest(jax_layers.after(lambda tree: READS[form](owg.read(tree["fc"].value)), tree)))
    # shared state needs no call of read, one for each use is right as well
    assert newest(jax.jit(owg.grad(lambda tree: READS[form](tree["fc"].value)))(tree)) == 5
    each = jax.jit(owg.grad(lambda tree: sum(use(x, owg.read(tree["fc"].value)) for x in inputs())))(tree)
    assert newest(each) == 5


@pytest.mark.parametrize("uses", [1, 2])
@pytest.mark.parametrize("check_vma", [True, False])
def test_what_devices_share_without_replicated_is_nan(devices, check_vma, uses):
    def local(meta, xs):
        return jax.lax.psum(sum(use(x, meta) for x in xs[:uses]), "a")

    def loss(tree):
        specs = P(), P(None, "a")
        inside = jax.shard_map(local, mesh=mesh_of(devices), in_specs=specs, out_specs=P(), check_vma=check_vma)
        return inside(owg.read(tree["fc"].value), inputs()[1:])

    tree = {"fc": owg.Overwrite(owg.init_meta(SCALING))}
    found = newest(jax_layers.after(loss, tree))
    assert found == 5 if check_vma and uses == 1 else np.isnan(found)


def test_an_axis_that_replicated_is_not_told_of_is_asked_for(devices):
    def local(meta, xs):
        return use(xs[0], owg.replicated(meta, "a"))[None]

    inside = jax.shard_map(
        local, mesh=mesh_of(devices), in_specs=(P(), P(None, "a")), out_specs=P("a"), check_vma=False
    )
    with pytest.raises(Fp8Error, match="got the axes a, and the shard_map has b as well"):
        inside(owg.init_meta(SCALING), inputs())


def test_examples_of_vmap_of_grad_keep_what_they_see():
    tree = {"w": jnp.float32(1), "fc": owg.Overwrite(owg.init_meta(SCALING))}

    def loss(tree, x):
        return tree["w"] * use(x, tree["fc"].value)

    each = jax.jit(jax.vmap(owg.grad(loss), (None, 0)))(tree, inputs())["fc"].value
    np.testing.assert_array_equal(each["input_amax_history"][:, 0], [1, 5, 3, 2])
    together = jax_layers.after(lambda tree: jax.vmap(loss, (None, 0))(tree, inputs()).sum(), tree)["fc"].value
    np.testing.assert_array_equal(together["input_amax_history"], [5, 0])


def test_report_names_impossible_values():
    meta = owg.init_meta(SCALING)
    added = T(lambda a: a - 0.05, meta)
    suspicious = owg.report({"fc": owg.Overwrite(added)}).suspicious
    assert len(suspicious) == 3
    assert "a negative amax" in suspicious[0].suspicion


def test_arguments_may_be_counted_from_the_last():
    each = jax.vmap(owg.grad(use, argnums=-1), in_axes=(0, None))(inputs(), owg.init_meta(SCALING))
    np.testing.assert_array_equal(each["input_amax_history"][:, 0], [1, 5, 3, 2])


def test_gradients_in_the_place_of_the_state_are_nan_in_the_next_step():
    """As training steps do that overwrite state by themselves: `next_state` is for them."""
    tree = {"w": jnp.float32(1), "fc": owg.init_meta(SCALING)}
    gradients = owg.grad(lambda tree: use(inputs()[1], tree["fc"]))(tree)
    assert np.isfinite(use(inputs()[1], owg.next_state(tree, gradients)["fc"]))
    assert np.isnan(use(inputs()[1], gradients["fc"]))
    assert "gradients were put in the place of the state" in str(owg.report(gradients))
