"""NNX: layers, the Variable type of their state, and the conversion of models by rules."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fp8_jax_owg as owg
from fp8_common import Fp8Error
from fp8_jax_owg import CurrentScaling, DelayedScaling
from tests.helpers import jax_layers

nnx = pytest.importorskip("flax.nnx", reason="needs flax")
fp8_nnx = pytest.importorskip("fp8_jax_owg.nnx")

SCALING = DelayedScaling(amax_history_length=2)


@pytest.fixture
def model():
    class Model(nnx.Module):
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

    return Model(nnx.Rngs(0))


def sample():
    return jnp.asarray(np.random.default_rng(0).normal(size=(2, 6, 8)), jnp.float32)


def gradients(model, x):
    definition, state, rest = nnx.split(model, (nnx.Param, fp8_nnx.OverwriteWithGradient), ...)

    def loss(state):
        return (nnx.merge(definition, state, rest)(x) ** 2).sum()

    return jax.jit(owg.value_and_grad(loss))(state)[1]


@nnx.jit
def run(model, x):
    return model(x)


def test_a_converted_model_runs_in_fp8_and_observes(model):
    x, before = sample(), run(model, sample())
    assert fp8_nnx.convert_to_fp8(model, scaling=SCALING) is model
    after = run(model, x)
    assert 0 < np.linalg.norm(after - before) < 0.5 * np.linalg.norm(before)
    grads = nnx.to_pure_dict(gradients(model, x))
    assert grads["inp"]["dot_general"]["input_amax_history"][0] == np.abs(x).max()
    assert len(grads["conv"]["conv_general_dilated"]) == 4
    assert set(grads["einsum"]["einsum_op"]) == set(owg.init_meta())


def test_rules_choose_layers_and_recipes(model):
    fp8_nnx.convert_to_fp8(model, ["*", "!blocks.1", "attention.* = tensorwise", "inp = tensorwise_delayed"])
    assert not hasattr(model.blocks[1].dot_general, "scaling")
    assert model.attention.query.dot_general.scaling == CurrentScaling()
    assert model.inp.dot_general.scaling == DelayedScaling(amax_history_length=16)
    assert model.blocks[0].dot_general.scaling == DelayedScaling()


def test_conversions_that_cannot_be_meant_are_refused(model):
    with pytest.raises(Fp8Error, match="No layer to convert among 9"):
        fp8_nnx.convert_to_fp8(model, ["!*"])
    with pytest.raises(Fp8Error, match=r"cannot honour recipe 'mxfp8'.*granularity='mx'"):
        fp8_nnx.convert_to_fp8(model, ["inp = mxfp8"])
    fp8_nnx.convert_to_fp8(model, ["inp"])
    with pytest.raises(Fp8Error, match="'inp' is in FP8 already"):
        fp8_nnx.convert_to_fp8(model)
    with pytest.warns(UserWarning, match="matched none"):
        fp8_nnx.convert_to_fp8(model, ["einsum", "nowhere"])


def test_layers_hand_on_dtype_precision_and_scaling():
    settings = {"dtype": jnp.float16, "preferred_element_type": jnp.float32, "precision": jax.lax.Precision.HIGHEST}
    settings |= {"scaling": DelayedScaling(amax_history_length=7), "rngs": nnx.Rngs(0)}
    for layer in (
        jax_layers.linear(8, 4, use_bias=False, **settings),
        jax_layers.einsum("bsd,de->bse", (8, 4), **settings),
    ):
        traced = jax.make_jaxpr(lambda x, layer=layer: layer(x))(sample())
        assert traced.out_avals[0].dtype == jnp.float32
        assert "precision=(Precision.HIGHEST" in str(traced)
        state = nnx.state(layer, fp8_nnx.OverwriteWithGradient)
        assert {leaf.shape for leaf in jax.tree.leaves(state)} == {(1,), (7,)}


def test_state_is_no_parameter():
    layer = jax_layers.linear(8, 4, scaling=SCALING, rngs=nnx.Rngs(0))
    _, params, state = nnx.split(layer, nnx.Param, fp8_nnx.OverwriteWithGradient)
    assert len(jax.tree.leaves(params)) == 2
    assert len(jax.tree.leaves(state)) == 6
    assert all(jax.tree.leaves(owg.owg_mask(state)))
    assert not any(jax.tree.leaves(owg.owg_mask(params)))


def small(seed=0):
    return fp8_nnx.convert_to_fp8(nnx.Linear(4, 4, rngs=nnx.Rngs(seed)), scaling=SCALING)


BOTH = nnx.Any(nnx.Param, fp8_nnx.OverwriteWithGradient)


def newest(gradients):
    return float(nnx.to_pure_dict(gradients)["dot_general"]["input_amax_history"][0])


def test_rngs_and_metrics_that_are_arguments_are_changed():
    model, rngs, metric, dropout = small(), nnx.Rngs(0), nnx.metrics.Average(), nnx.Dropout(0.5)
    seen = []

    def loss(model, rngs, metric, x, *, cache):
        y = dropout(model(x), rngs=rngs)
        metric.update(values=(y**2).mean())
        cache["calls"][...] += 1
        return (y**2).mean()

    cache = {"calls": nnx.Variable(jnp.int32(0))}
    for _ in range(2):
        value, gradients = fp8_nnx.value_and_grad(loss, wrt=BOTH)(model, rngs, metric, jnp.ones((2, 4)), cache=cache)
        seen.append(value)
        assert newest(gradients) == 1
    assert seen[0] != seen[1], "the random numbers were the same"
    assert metric.count[...] == 2
    np.testing.assert_allclose(metric.total[...], np.sum(seen), rtol=1e-6)
    assert cache["calls"][...] == 2


def test_several_models_are_differentiated_by_number():
    both, x = (small(0), small(1)), jnp.full((2, 4), 3.0)

    def loss(x, one, other):
        return (one(x) * other(2 * x)).sum()

    first, second = fp8_nnx.grad(loss, argnums=(1, 2), wrt=BOTH)(x, *both)
    assert (newest(first), newest(second)) == (3, 6)
    assert newest(fp8_nnx.grad(loss, argnums=-1, wrt=BOTH)(x, *both)) == 6
    # one model as two arguments has one state
    model = small()
    assert newest(fp8_nnx.grad(lambda model, again: loss(x, model, again["it"]), wrt=BOTH)(model, {"it": model})) == 6


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

    stack = fp8_nnx.convert_to_fp8(nnx.jit(make)(nnx.Rngs(0)), scaling=SCALING)
    nnx.jit(fp8_nnx.grad(lambda stack: forward(stack, jnp.ones((1, 4))).sum()))(stack)
    np.testing.assert_array_equal(stack.dot_general.input_amax_history[...], [[1, 0], [2, 0], [4, 0]])
    with pytest.raises(Fp8Error, match=r"has shape \(4, 2, 4\), and that of one layer is \(4, 4\)"):
        fp8_nnx.convert_to_fp8(make_inside(nnx.Rngs(0)))


def test_a_subclass_whose_calls_do_not_multiply_through_the_layer_is_refused():
    class Own(nnx.Linear):
        def __call__(self, x):
            return x @ self.kernel[...]

    class Doubled(nnx.Linear):
        def __call__(self, x):
            return 2 * super().__call__(x)

    model = nnx.Sequential(Own(4, 4, rngs=nnx.Rngs(0)), Doubled(4, 4, rngs=nnx.Rngs(0)))
    with pytest.raises(Fp8Error, match=r"is a Own with a __call__ of its own.*'!layers.0'"):
        fp8_nnx.convert_to_fp8(model)
    fp8_nnx.convert_to_fp8(model, ["*", "!layers.0"])
    assert owg.assert_fp8_dots(lambda x: model.layers[1](x), jnp.ones((2, 4)))
