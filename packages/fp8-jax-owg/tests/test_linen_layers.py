"""Linen: flax's names, shapes and checkpoints; every layer that takes a product runs in FP8 in all three."""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fp8_common
import fp8_jax_owg as owg
from fp8_common import Fp8Error
from fp8_jax_owg import CurrentScaling, DelayedScaling
from tests.helpers import jax_layers

nn = pytest.importorskip("flax.linen", reason="needs flax")
fp8_linen = pytest.importorskip("fp8_jax_owg.linen")

OWG = "_overwrite_with_gradient"
LEAVES = {f"{t}_{kind}" for t in ("input", "kernel", "output_grad") for kind in ("scale", "amax_history")}


def make(name, cls=None, length=3):
    cls = cls or fp8_linen.Fp8DotGeneralOp
    op = functools.partial(cls, amax_history_length=length)
    return {
        "Dense": lambda: nn.Dense(8, dot_general_cls=op),
        "DenseGeneral": lambda: nn.DenseGeneral((2, 4), axis=(-2, -1), dot_general_cls=op),
        "attention": lambda: nn.MultiHeadDotProductAttention(2, qkv_dot_general_cls=op, out_dot_general_cls=op),
    }[name]()


def sample():
    return jnp.asarray(np.random.default_rng(0).normal(size=(2, 6, 8)), jnp.float32)


PRODUCTS = {"Dense": (1, 0), "DenseGeneral": (1, 0), "attention": (4, 2)}


@pytest.mark.parametrize("name", list(PRODUCTS))
def test_layers_run_all_three_products_in_fp8(name):
    layer, x = make(name), sample()
    variables = layer.init(jax.random.key(0), x)
    fp8, others = PRODUCTS[name]

    def gradients(variables, x):
        return jax.grad(lambda v, x: layer.apply(v, x).sum(), (0, 1))(variables, x)

    dots = owg.assert_fp8_dots(gradients, variables, x, others=3 * others)
    assert len(dots) == 3 * (fp8 + others)


@pytest.mark.parametrize("name", ["Dense", "attention"])
def test_names_and_shapes_are_those_of_flax_and_its_checkpoints_load(name):
    ours = make(name, fp8_linen.Fp8DirectDotGeneralOp)
    theirs = make(name, nn.Fp8DirectDotGeneralOp)
    x = sample()
    checkpoint = theirs.init(jax.random.key(0), x)
    assert jax.tree.map(jnp.shape, ours.init(jax.random.key(0), x)) == jax.tree.map(jnp.shape, checkpoint)
    found, wanted = ours.apply(checkpoint, x), theirs.apply(checkpoint, x)
    assert np.linalg.norm(found - wanted) < 1e-5 * np.linalg.norm(wanted)


def test_the_formats_of_mi300_give_flax_numbers_and_its_checkpoints_load():
    class NANOOFp8DotGeneralOp(fp8_linen.Fp8DotGeneralOp):
        """Named as flax names it."""

    def layer(cls, **settings):
        op = functools.partial(cls, amax_history_length=3, **settings)
        ones = functools.partial(np.random.default_rng(1).integers, -8, 9)  # exact in both formats
        return nn.Dense(4, use_bias=False, dot_general_cls=op, kernel_init=lambda _, *a: jnp.asarray(ones(a[0]), a[1]))

    theirs = layer(nn.NANOOFp8DotGeneralOp)
    ours = layer(NANOOFp8DotGeneralOp, scaling=DelayedScaling(fp8_format="HYBRID_FNUZ"))
    x = jnp.asarray(np.random.default_rng(0).integers(-8, 9, (6, 8)), jnp.float32)
    with jax.numpy_dtype_promotion("standard"):  # flax's function mixes dtypes
        checkpoint = theirs.init(jax.random.key(0), x)
        wanted, pull = jax.vjp(theirs.apply, checkpoint, x)
        expected = pull(wanted)
    found, pull = jax.vjp(ours.apply, checkpoint, x)
    np.testing.assert_array_equal(found, wanted)
    after, d_x = pull(wanted)
    np.testing.assert_allclose(d_x, expected[1], rtol=1e-6)
    np.testing.assert_allclose(after["params"]["kernel"], expected[0]["params"]["kernel"], rtol=1e-6)
    (state,), (other,) = (tree[OWG].values() for tree in (after, expected[0]))
    np.testing.assert_array_equal(state["input_amax_history"][:1], other["input_amax_history"][:1])
    assert {dtype.name for dot in owg.find_dots(ours.apply, checkpoint, x) for dtype in dot.operands} == {
        "float8_e4m3fnuz"
    }


def test_the_older_operation_of_flax_loads_too():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        checkpoint = make("Dense", nn.Fp8DotGeneralOp).init(jax.random.key(0), sample())
    ours = make("Dense").init(jax.random.key(0), sample())
    assert jax.tree.structure(ours) == jax.tree.structure(checkpoint)


@pytest.mark.parametrize("algo", ["max", "most_recent"])
@pytest.mark.parametrize("margin", [0, 2])
def test_histories_and_scales_equal_the_definition_over_twice_the_window(algo, margin):
    scaling = DelayedScaling(amax_history_length=3, amax_compute_algo=algo, margin=margin)
    layer = jax_layers.dense(4, use_bias=False, scaling=scaling)
    random = np.random.default_rng(0)
    inputs = [jnp.asarray(random.normal(size=(5, 8)) * size, jnp.float32) for size in (1, 0, 40, 1e-4, 3, 7, 1e6)]
    variables = layer.init(jax.random.key(0), inputs[0])
    step = jax.jit(owg.value_and_grad(lambda v, x: (layer.apply(v, x) ** 2).sum()))
    window, scale = np.zeros(3, np.float32), np.float32(1)
    for x in inputs:
        variables = {**variables, OWG: owg.next_state(variables, step(variables, x)[1])[OWG]}
        leaves = variables[OWG]["Fp8DotGeneralOp_0"]
        assert set(leaves) == LEAVES
        np.testing.assert_array_equal(leaves["input_scale"], fp8_common.reciprocal(scale))
        window, seen = fp8_common.update_history(window, fp8_common.amax(np.asarray(x)), algo)
        np.testing.assert_array_equal(leaves["input_amax_history"], window)
        scale = fp8_common.amax_to_scale(seen, "e4m3", scaling.policy, prev=scale)


def test_current_scaling_keeps_no_state():
    layer = jax_layers.dense(4, scaling=CurrentScaling(granularity="row"))
    assert set(layer.init(jax.random.key(0), sample())) == {"params"}


def test_einsum_with_experts_as_a_batch_dimension():
    einsum, x = fp8_linen.Fp8Einsum(amax_history_length=2), jnp.ones((3, 4, 8))
    variables = einsum.init(jax.random.key(0), "ebd,edf->ebf", x, jnp.ones((3, 8, 5)))
    assert set(variables[OWG]) == LEAVES
    out = einsum.apply(variables, "ebd,edf->ebf", x, jnp.ones((3, 8, 5)))
    np.testing.assert_array_equal(out, np.full((3, 4, 5), 8))


@pytest.mark.parametrize("operation", [fp8_linen.Fp8DotGeneralOp, fp8_linen.Fp8Einsum])
def test_operations_hand_on_dtype_precision_and_scaling(operation):
    x, w = jnp.ones((2, 3)), jnp.ones((3, 4))
    how = (x, w, (((1,), (0,)), ((), ()))) if operation is fp8_linen.Fp8DotGeneralOp else ("ij,jk->ik", x, w)
    op = operation(scaling=CurrentScaling(fp8_format="E4M3"))
    traced = jax.make_jaxpr(lambda: op.apply({}, *how, jax.lax.Precision.HIGHEST, jnp.bfloat16))()
    assert traced.out_avals[0].dtype == jnp.bfloat16
    assert "precision=(Precision.HIGHEST" in str(traced)
    backward = jax.make_jaxpr(jax.grad(lambda g: (op.apply({}, *how) * g).sum()))(1.0)
    assert "e5m2" not in str(backward)


def test_a_convolution_layer_trains():
    layer = nn.Conv(4, (3,), conv_general_dilated_cls=fp8_linen.Fp8ConvGeneralDilatedOp)
    x = sample()
    variables = layer.init(jax.random.key(0), x)
    _, grads = owg.value_and_grad(lambda v: (layer.apply(v, x) ** 2).sum())(variables)
    wanted = jax.grad(lambda p: (nn.Conv(4, (3,)).apply({"params": p}, x) ** 2).sum())(variables["params"])
    distance = np.linalg.norm(grads["params"]["kernel"] - wanted["kernel"])
    assert distance < 0.08 * np.linalg.norm(wanted["kernel"])
    state = grads[OWG]["Fp8ConvGeneralDilatedOp_0"]
    assert set(state) == {name for name in LEAVES if "grad" not in name}
    assert state["input_amax_history"][0] == np.abs(x).max()


def test_a_layer_that_is_called_twice_has_one_state():
    class Twice(nn.Module):
        @nn.compact
        def __call__(self, x):
            layer = jax_layers.dense(8, scaling=DelayedScaling(amax_history_length=2))
            return layer(x) + layer(5 * x)

    x = sample()
    variables = Twice().init(jax.random.key(0), x)
    _, grads = owg.value_and_grad(lambda v: Twice().apply(v, x).sum())(variables)
    state = grads[OWG]["Dense_0"]["Fp8DotGeneralOp_0"]
    assert state["input_amax_history"][0] == np.abs(5 * x).max()


def test_missing_state_is_explained():
    layer = make("Dense")
    params = layer.init(jax.random.key(0), sample())["params"]
    with pytest.raises(Fp8Error, match="FP8 state of Fp8DotGeneralOp_0 is missing"):
        layer.apply({"params": params}, sample())
