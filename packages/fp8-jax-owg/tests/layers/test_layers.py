"""Layers of Linen and NNX in FP8: recipes and rules that choose them, flax's names, what they observe, refusals."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

import fp8_common
import fp8_jax_owg as owg
import jax_layers
from fp8_common import POWER_OF_2, RECIPES, CastRecipe, Fp8Error, Recipe
from fp8_jax_owg import CurrentScaling, DelayedScaling, checkpoint
from fp8_jax_owg import linen as owg_linen
from fp8_jax_owg import nnx as owg_nnx
from fp8_jax_owg.scaling import as_scaling, recipe_of
from jax_layers import BOTH, COLLECTION, MATMUL, T, distance, newest, normal

SCALING = DelayedScaling(amax_history_length=2)
LEAVES = set(owg.init_meta())
KEY = jax.random.key


def sample():
    return normal(2, 6, 8)


# ---------------------------------------------------------------- recipes

HONOURED = {
    "tensorwise": CurrentScaling(),
    "tensorwise_delayed": DelayedScaling(amax_history_length=16),
    "rowwise": CurrentScaling(granularity="row", fp8_format="E4M3", power_of_2=True),
}


def test_a_recipe_is_taken_by_name_object_and_dictionary_and_comes_back():
    for name, scaling in HONOURED.items():
        for choice in (name, RECIPES[name], RECIPES[name].to_dict()):
            assert as_scaling(choice) == scaling
    for scaling in (
        DelayedScaling(amax_history_length=7, margin=2, amax_compute_algo="most_recent", fp8_format="E4M3"),
        CurrentScaling(granularity="row", fp8_format="E4M3_FNUZ"),
        CurrentScaling(power_of_2=True),
    ):
        assert as_scaling(recipe_of(scaling)) == as_scaling(recipe_of(scaling).to_dict()) == scaling


UNLIKE = dataclasses.replace(RECIPES["tensorwise"], weight_for_grad_input=CastRecipe(policy=POWER_OF_2))
STATIC = Recipe(name="mine", input=CastRecipe(scaling="static", static_scale=2.0))


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ("blockwise", r"'blockwise': in the matmul 'output', input has granularity='blockwise_1x128'"),
        ("rowwise_with_gw_hp", r"in the matmul 'grad_weight', input has scaling='disabled'"),
        (UNLIKE, r"in the matmul 'grad_input', weight has policy.power_of_2=True, .*recipe has False"),
        (STATIC, r"input has scaling='static'"),
        ("delayed", "Unknown recipe 'delayed'. Use one of tensorwise"),
        (16, "A recipe is a name"),
    ],
)
def test_what_cannot_be_honoured_raises_with_its_field(choice, message):
    with pytest.raises(Fp8Error, match=message):
        jax_layers.dense(4, scaling=choice).init(KEY(0), sample())  # a partial makes the operation late
    with pytest.raises(Fp8Error, match=message):
        jax_layers.linear(4, 4, scaling=choice, rngs=nnx.Rngs(0))


def test_every_place_that_takes_a_scaling_takes_a_recipe():
    x, w, name = normal(4, 8), normal(8, 5), "tensorwise_delayed"
    meta = owg.init_meta(name)
    assert meta["input_amax_history"].shape == (16,)
    wanted = owg.fp8_dot_general(x, w, MATMUL, meta=meta, scaling=HONOURED[name])
    np.testing.assert_array_equal(owg.fp8_dot_general(x, w, MATMUL, meta=meta, scaling=name), wanted)
    np.testing.assert_array_equal(owg.fp8_einsum("ab,bc->ac", x, w, meta=meta, scaling=name), wanted)
    state = meta["input_scale"], meta["input_amax_history"]
    assert owg.flax_casts.in_q(x, *state, scaling=name)[0].dtype == jnp.float8_e4m3fn
    with pytest.raises(Fp8Error, match="needs delayed scaling"):
        owg.flax_casts.in_q(x, *state, scaling="tensorwise")
    assert set(jax_layers.dense(4, scaling=CurrentScaling()).init(KEY(0), x)) == {"params"}


# ---------------------------------------------------------------- flax's names and numbers


def attention(kind):
    op = functools.partial(kind.Fp8DirectDotGeneralOp, amax_history_length=3)
    return nn.MultiHeadDotProductAttention(2, qkv_dot_general_cls=op, out_dot_general_cls=op)


def test_names_and_shapes_are_those_of_flax_and_its_checkpoints_load_with_its_numbers():
    """All products of the layers in attention are in FP8; of two activations each, six are not."""
    ours, theirs, x = attention(owg_linen), attention(nn), sample()
    saved, variables = jax.jit(theirs.init)(KEY(0), x), jax.eval_shape(ours.init, KEY(0), x)
    assert T(jnp.shape, variables) == T(jnp.shape, saved)
    assert distance(ours.apply(saved, x), theirs.apply(saved, x)) < 1e-5
    T(np.testing.assert_array_equal, checkpoint.upgrade(saved, variables), saved)
    gradients = jax.grad(lambda v, x: ours.apply(v, x).sum(), (0, 1))
    assert len(owg.testing.assert_fp8_dots(gradients, saved, x, others=6)) == 18


@pytest.mark.parametrize(("algo", "margin"), [("max", 2), ("most_recent", 0)])
def test_histories_and_scales_equal_the_definition_over_twice_the_window(algo, margin):
    scaling = DelayedScaling(amax_history_length=3, amax_compute_algo=algo, margin=margin)
    layer = jax_layers.dense(4, use_bias=False, scaling=scaling)
    inputs = [normal(5, 8, seed=i) * size for i, size in enumerate((1, 0, 40, 1e-4, 3, 7, 1e6))]
    variables = jax.jit(layer.init)(KEY(0), inputs[0])
    step = jax.jit(owg.grad(lambda v, x: (layer.apply(v, x) ** 2).sum()))
    window, scale = np.zeros(3, np.float32), np.float32(1)
    for x in inputs:
        variables = {**variables, COLLECTION: owg.tree.next_state(variables, step(variables, x))[COLLECTION]}
        leaves = variables[COLLECTION]["Fp8DotGeneralOp_0"]
        assert set(leaves) == LEAVES
        np.testing.assert_array_equal(leaves["input_scale"], fp8_common.numerics.reciprocal(scale))
        window, seen = fp8_common.numerics.update_history(window, fp8_common.amax(np.asarray(x)), algo)
        np.testing.assert_array_equal(leaves["input_amax_history"], window)
        scale = fp8_common.amax_to_scale(seen, "e4m3", scaling.policy, prev=scale)


# ---------------------------------------------------------------- what layers hand on

E4M3 = CurrentScaling(fp8_format="E4M3")
HANDED_ON = {
    "linen dot": lambda *a: owg_linen.Fp8DotGeneralOp(scaling=E4M3).apply({}, *a[:2], MATMUL, *a[2:]),
    "linen einsum": lambda *a: owg_linen.Fp8Einsum(scaling=E4M3).apply({}, "ij,jk->ik", *a),
    "nnx dot": lambda *a: owg_nnx.Fp8DotGeneralOp(E4M3)(*a[:2], MATMUL, *a[2:]),
    "nnx einsum": lambda *a: owg_nnx.Fp8EinsumOp(E4M3)(
        "ij,jk->ik", *a[:2], precision=a[2], preferred_element_type=a[3]
    ),
}


@pytest.mark.parametrize("how", HANDED_ON)
def test_operations_hand_on_dtype_precision_and_scaling(how):
    def run(x):
        return HANDED_ON[how](x, jnp.ones((3, 4)), jax.lax.Precision.HIGHEST, jnp.bfloat16)

    traced = jax.make_jaxpr(run)(jnp.ones((2, 3)))
    assert traced.out_avals[0].dtype == jnp.bfloat16
    assert "precision=(Precision.HIGHEST" in str(traced)
    backward = jax.make_jaxpr(jax.grad(lambda x: run(x).astype(jnp.float32).sum()))(jnp.ones((2, 3)))
    assert "e5m2" not in str(backward)


def test_layers_of_one_operation_are_equal():
    # two partials never compare equal, so a program that makes layers anew makes the partial once
    op = functools.partial(owg_linen.Fp8DotGeneralOp, scaling=SCALING)
    dense = functools.partial(nn.Dense, 4, dot_general_cls=op)
    assert dense() == dense()
    assert hash(dense()) == hash(dense())
    assert dense() != nn.Dense(4, dot_general_cls=owg_linen.Fp8DotGeneralOp)


def test_state_that_is_missing_or_of_another_length_is_explained():
    layer, x = jax_layers.dense(4, scaling=SCALING), jnp.ones((2, 3))
    saved = jax_layers.dense(4, scaling=DelayedScaling(amax_history_length=5)).init(KEY(0), x)
    with pytest.raises(Fp8Error, match="FP8 state of Fp8DotGeneralOp_0 is missing"):
        layer.apply({"params": saved["params"]}, x)
    with pytest.raises(Fp8Error, match=r"have 5 entries.*amax_history_length=2.*checkpoint.upgrade"):
        layer.apply(saved, x)
    assert layer.apply(checkpoint.upgrade(saved, jax.eval_shape(layer.init, KEY(0), x)), x).shape == (2, 4)
    # without settings the state tells its length
    assert owg.fp8_dot_general(x, jnp.ones((3, 4)), MATMUL, meta=owg.init_meta(SCALING)).shape == (2, 4)


# ---------------------------------------------------------------- conversions


class Converted(nnx.Module):
    def __init__(self, rngs):
        self.inp = nnx.Linear(8, 8, rngs=rngs)
        self.blocks = nnx.List([nnx.Linear(8, 8, rngs=rngs) for _ in range(2)])
        self.einsum = nnx.Einsum("bsd,de->bse", (8, 8), rngs=rngs)
        self.attention = nnx.MultiHeadAttention(2, 8, decode=False, rngs=rngs)
        self.conv = nnx.Conv(8, 8, (3,), rngs=rngs)

    def __call__(self, x):
        x = self.inp(x)
        for block in self.blocks:
            x = block(x)
        return self.conv(self.attention(self.einsum(x)))


@pytest.fixture
def model():
    return Converted(nnx.Rngs(0))


def test_a_converted_model_of_nnx_runs_in_fp8_and_observes(model):
    run = nnx.jit(lambda model, x: model(x))
    x, before = sample(), run(model, sample())
    assert owg_nnx.convert_to_fp8(model, scaling=SCALING) is model
    _, params, state = nnx.split(model, nnx.Param, owg_nnx.OverwriteWithGradient)
    assert all(jax.tree.leaves(owg.tree.owg_mask(state)))
    assert not any(jax.tree.leaves(owg.tree.owg_mask(params)))
    loss = lambda model: (model(x) ** 2).sum()  # noqa: E731
    assert 0 < distance(run(model, x), before) < 0.5
    grads = nnx.to_pure_dict(nnx.jit(owg_nnx.grad(loss, wrt=BOTH))(model))
    assert newest(grads["inp"]["dot_general"]) == np.abs(x).max()
    assert len(grads["conv"]["conv_general_dilated"]) == 4
    assert set(grads["einsum"]["einsum_op"]) == LEAVES


def test_rules_choose_layers_and_recipes(model):
    owg_nnx.convert_to_fp8(model, ["*", "!blocks.1", "attention.* = tensorwise", "inp = tensorwise_delayed"])
    assert not hasattr(model.blocks[1].dot_general, "scaling")
    assert model.attention.query.dot_general.scaling == CurrentScaling()
    assert model.inp.dot_general.scaling == DelayedScaling(amax_history_length=16)
    assert model.blocks[0].dot_general.scaling == DelayedScaling()
    other = owg_nnx.convert_to_fp8(Converted(nnx.Rngs(0)), lambda layer, name: name == "inp", scaling="tensorwise")
    assert other.inp.dot_general.scaling == CurrentScaling()
    assert not hasattr(other.blocks[0].dot_general, "scaling")


def test_conversions_that_are_invalid_raise(model):
    for rules in (["!*"], lambda layer, name: False):
        with pytest.raises(Fp8Error, match="No layer to convert among 9"):
            owg_nnx.convert_to_fp8(model, rules)
    with pytest.raises(Fp8Error, match=r"do not support recipe 'mxfp8'.*granularity='mx'"):
        owg_nnx.convert_to_fp8(model, ["inp = mxfp8"])
    owg_nnx.convert_to_fp8(model, ["inp"])
    with pytest.raises(Fp8Error, match="'inp' is in FP8 already"):
        owg_nnx.convert_to_fp8(model)
    with pytest.warns(UserWarning, match="matched none"):
        owg_nnx.convert_to_fp8(model, ["einsum", "nowhere"])
    with pytest.raises(Fp8Error, match="No layer of Dense was converted"):
        owg_linen.convert_to_fp8(nn.Dense(4), ["!*"]).init(KEY(0), sample())


def test_a_subclass_whose_calls_do_not_multiply_through_the_layer_raises():
    class Own(nnx.Linear):
        def __call__(self, x):
            return x @ self.kernel[...]

    class Doubled(nnx.Linear):
        def __call__(self, x):
            return 2 * super().__call__(x)

    model = nnx.Sequential(Own(4, 4, rngs=nnx.Rngs(0)), Doubled(4, 4, rngs=nnx.Rngs(0)))
    with pytest.raises(Fp8Error, match=r"is a Own with a custom __call__.*'!layers.0'"):
        owg_nnx.convert_to_fp8(model)
    owg_nnx.convert_to_fp8(model, ["*", "!layers.0"])
    assert owg.testing.assert_fp8_dots(lambda x: model.layers[1](x), jnp.ones((2, 4)))


def test_layers_that_vmap_has_stacked_keep_a_state_each():
    @nnx.split_rngs(splits=3)
    @nnx.vmap(in_axes=(0,), out_axes=0)
    def make(rngs):
        return nnx.Linear(4, 4, kernel_init=nnx.initializers.constant(0.5), rngs=rngs)

    @nnx.split_rngs(splits=2)
    @nnx.vmap(in_axes=(0,), out_axes=1)
    def make_inside(rngs):
        return nnx.Linear(4, 4, use_bias=False, rngs=rngs)

    @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
    def forward(layer, h):
        return layer(h)

    stack = owg_nnx.convert_to_fp8(nnx.jit(make)(nnx.Rngs(0)), scaling=SCALING)
    nnx.jit(owg_nnx.grad(lambda stack: forward(stack, jnp.ones((1, 4))).sum()))(stack)
    np.testing.assert_array_equal(stack.dot_general.input_amax_history[...], [[1, 0], [2, 0], [4, 0]])
    with pytest.raises(Fp8Error, match=r"has shape \(4, 2, 4\), and one layer's kernel has \(4, 4\)"):
        owg_nnx.convert_to_fp8(make_inside(nnx.Rngs(0)))


def test_a_linen_model_keeps_its_parameters_and_gets_state():
    class Inner(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.MultiHeadDotProductAttention(2, qkv_features=8, name="attention")(nn.Dense(8, name="first")(x))
            return nn.Dense(4, name="last")(nn.Conv(8, (3,), name="conv")(x))

    plain, x = Inner(), sample()
    model = owg_linen.convert_to_fp8(plain, ["*", "!last", "conv = tensorwise"], scaling=SCALING)
    wanted, variables = jax.jit(plain.init)(KEY(0), x), jax.jit(model.init)(KEY(0), x)
    T(np.testing.assert_array_equal, variables["params"], wanted["params"])
    assert set(variables[COLLECTION]) == {"first", "attention"}
    exact = plain.apply(wanted, x)
    after = jax.jit(owg.grad(lambda v: (model.apply(v, x) ** 2).sum()))(variables)
    assert 0 < distance(model.apply(variables, x), exact) < 0.2
    histories = [a for path, a in jax.tree_util.tree_leaves_with_path(after[COLLECTION]) if "input_amax" in str(path)]
    assert len(histories) == 5
    assert all(history[0] > 0 for history in histories)
    assert newest(after[COLLECTION]["first"]) == np.abs(x).max()
    # the layers of the module itself stay as they were
    np.testing.assert_array_equal(plain.apply(wanted, x), exact)
    by_filter = owg_linen.convert_to_fp8(nn.Sequential([nn.Dense(4), nn.Dense(3)]), lambda _, name: name == "layers_1")
    assert set(by_filter.init(KEY(0), sample())[COLLECTION]) == {"layers_1"}


class Mixed(nn.Module):
    @nn.compact
    def __call__(self, x):
        embed = nn.Embed(8, 8, name="embed")
        x = nn.Einsum((8, 8), "...i,io->...o", name="einsum")(nn.Dense(8, name="first")(x))
        x = nn.Dense(8, dot_general=jax.lax.dot_general, name="own")(x)
        return embed.attend(nn.Dense(8, name="last")(x))


def test_a_conversion_logs_what_it_leaves_out_and_why(caplog):
    model = owg_linen.convert_to_fp8(Mixed(), ["*", "!last"])
    assert repr(model).startswith("convert_to_fp8(Mixed(")
    variables = jax.eval_shape(model.init, KEY(0), sample())
    wanted = (
        "FP8: converted 1 of 5 layers. Left out: einsum (Einsum has no FP8 matmul here), own (it has a custom "
        "operation), last (by the rules), embed (Embed has no FP8 matmul here)."
    )
    assert caplog.messages == [wanted]
    jax.eval_shape(model.apply, variables, sample())
    assert caplog.messages == [wanted]
    caplog.clear()
    layers = [nnx.Linear(4, 4, rngs=nnx.Rngs(0)) for _ in range(8)]
    owg_nnx.convert_to_fp8(nnx.Sequential(*layers), ["layers.0"])
    rest = ", ".join(f"layers.{i} (by the rules)" for i in range(1, 6))
    assert caplog.messages == [f"FP8: converted 1 of 8 layers. Left out: {rest} and 2 more."]
    caplog.clear()
    owg_nnx.convert_to_fp8(nnx.Sequential(nnx.Linear(4, 4, rngs=nnx.Rngs(0))))
    assert caplog.messages == ["FP8: converted 1 of 1 layers. No layer was left out."]


def test_a_local_convolution_is_left_out():
    with pytest.raises(Fp8Error, match="No layer of ConvLocal was converted"):
        owg_linen.convert_to_fp8(nn.ConvLocal(4, (3, 3))).init(KEY(0), jnp.ones((1, 8, 8, 2)))


@pytest.mark.parametrize("transform", ["scan", "vmap"])
def test_a_transform_that_does_not_lift_the_state_is_named_at_init(transform):
    class Block(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            return nn.Dense(8)(x), None

    def lifted(**axes):
        if transform == "scan":
            block = nn.scan(Block, split_rngs={"params": True}, length=2, **axes)()
        else:
            block = nn.vmap(Block, split_rngs={"params": True}, in_axes=(0, None), axis_size=2, **axes)()
        return jax.eval_shape(owg_linen.convert_to_fp8(block).init, KEY(0), jnp.ones((2, 8)), None)

    with pytest.raises(Fp8Error, match=r'Dense_0.*variable_axes=\{"params": 0, "_overwrite_with_gradient": 0\}'):
        lifted(variable_axes={"params": 0})
    state = lifted(variable_axes={"params": 0, COLLECTION: 0})[COLLECTION]
    assert state["Dense_0"]["Fp8DotGeneralOp_0"]["input_scale"].shape == (2, 1)


# ---------------------------------------------------------------- arguments of the gradients of NNX


def small(seed=0):
    return owg_nnx.convert_to_fp8(nnx.Linear(4, 4, rngs=nnx.Rngs(seed)), scaling=SCALING)


def seen(gradients):
    return newest(nnx.to_pure_dict(gradients))


def test_rngs_and_metrics_that_are_arguments_are_changed():
    model, rngs, metric, dropout = small(), nnx.Rngs(0), nnx.metrics.Average(), nnx.Dropout(0.5)
    cache, values = {"calls": nnx.Variable(jnp.int32(0))}, []

    @nnx.jit
    def step(model, rngs, metric, x, cache):
        def loss(model, rngs, metric, x, *, cache):
            y = dropout(model(x), rngs=rngs)
            metric.update(values=(y**2).mean())
            cache["calls"][...] += 1
            return (y**2).mean()

        return owg_nnx.value_and_grad(loss, wrt=BOTH)(model, rngs, metric, x, cache=cache)

    for _ in range(2):
        value, gradients = step(model, rngs, metric, jnp.ones((2, 4)), cache)
        values.append(value)
        assert seen(gradients) == 1
    assert values[0] != values[1], "the random numbers were the same"
    assert metric.count[...] == 2
    np.testing.assert_allclose(metric.total[...], np.sum(values), rtol=1e-6)
    assert cache["calls"][...] == 2


def test_several_models_are_differentiated_by_number():
    both, x = (small(0), small(1)), jnp.full((2, 4), 3.0)

    def loss(x, one, other):
        return (one(x) * other(2 * x)).sum()

    def gradient(loss, *args, **settings):
        return nnx.jit(owg_nnx.grad(loss, wrt=BOTH, **settings))(*args)

    assert [seen(one) for one in gradient(loss, x, *both, argnums=(1, 2))] == [3, 6]
    assert seen(gradient(loss, x, *both, argnums=-1)) == 6
    # one model as two arguments has one state
    assert seen(gradient(lambda model, again: loss(x, model, again["it"]), both[0], {"it": both[0]})) == 6
