"""Recipes of fp8_common where scaling is chosen: by name, object or dictionary; what cannot be honoured is refused."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fp8_jax_owg as owg
from fp8_common import POWER_OF_2, RECIPES, CastRecipe, Fp8Error, Recipe
from fp8_jax_owg import CurrentScaling, DelayedScaling
from fp8_jax_owg.scaling import as_scaling, recipe_of
from tests.helpers import jax_layers

nnx = pytest.importorskip("flax.nnx", reason="needs flax")
fp8_nnx = pytest.importorskip("fp8_jax_owg.nnx")
fp8_linen = pytest.importorskip("fp8_jax_owg.linen")

MATMUL = (((1,), (0,)), ((), ()))
HONOURED = {
    "tensorwise": CurrentScaling(),
    "tensorwise_delayed": DelayedScaling(amax_history_length=16),
    "rowwise": CurrentScaling(granularity="row", fp8_format="E4M3", power_of_2=True),
}


@pytest.mark.parametrize("name", HONOURED)
def test_a_recipe_is_taken_by_name_object_and_dictionary(name):
    for choice in (name, RECIPES[name], RECIPES[name].to_dict()):
        assert as_scaling(choice) == HONOURED[name]


@pytest.mark.parametrize(
    "scaling",
    [
        DelayedScaling(amax_history_length=7, margin=2, amax_compute_algo="most_recent", fp8_format="E4M3"),
        CurrentScaling(granularity="row", fp8_format="E4M3_FNUZ"),
        CurrentScaling(power_of_2=True),
    ],
    ids=str,
)
def test_a_scaling_comes_back_from_its_recipe(scaling):
    assert as_scaling(recipe_of(scaling)) == scaling
    assert as_scaling(recipe_of(scaling).to_dict()) == scaling


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ("blockwise", r"'blockwise': in the matmul 'output' its input has granularity='blockwise_1x128'"),
        ("rowwise_with_gw_hp", r"in the matmul 'grad_weight' its input has scaling='disabled'"),
        (
            dataclasses.replace(RECIPES["tensorwise"], weight_for_grad_input=CastRecipe(policy=POWER_OF_2)),
            r"in the matmul 'grad_input' its weight has policy.power_of_2=True, where they would have False",
        ),
        (Recipe(name="mine", input=CastRecipe(scaling="static", static_scale=2.0)), r"its input has scaling='static'"),
        ("delayed", "Unknown recipe 'delayed'. Use one of tensorwise"),
        (16, "scaling must be a DelayedScaling, a CurrentScaling, a Recipe"),
    ],
)
def test_what_cannot_be_honoured_is_refused_with_its_field(choice, message):
    with pytest.raises(Fp8Error, match=message):
        as_scaling(choice)
    with pytest.raises(Fp8Error, match=message):
        jax_layers.dense(4, scaling=choice).init(jax.random.key(0), sample(4, 8))  # a partial makes the operation late
    with pytest.raises(Fp8Error, match=message):
        jax_layers.linear(4, 4, scaling=choice, rngs=nnx.Rngs(0))


def sample(*shape):
    return jnp.asarray(np.random.default_rng(0).normal(size=shape), jnp.float32)


def test_every_place_that_takes_a_scaling_takes_a_recipe():
    x, w = sample(4, 8), sample(8, 5)
    name = "tensorwise_delayed"
    meta = owg.init_meta(name)
    assert meta["input_amax_history"].shape == (16,)
    wanted = owg.fp8_dot_general(x, w, MATMUL, meta=meta, scaling=HONOURED[name])
    np.testing.assert_array_equal(owg.fp8_dot_general(x, w, MATMUL, meta=meta, scaling=name), wanted)
    np.testing.assert_array_equal(owg.fp8_einsum("ab,bc->ac", x, w, meta=meta, scaling=name), wanted)
    codes, _ = owg.in_q(x, meta["input_scale"], meta["input_amax_history"], scaling=name)
    assert codes.dtype == jnp.float8_e4m3fn
    with pytest.raises(Fp8Error, match="needs delayed scaling"):
        owg.in_q(x, meta["input_scale"], meta["input_amax_history"], scaling="tensorwise")
    layer = jax_layers.dense(5, scaling=RECIPES[name].to_dict())
    variables = layer.init(jax.random.key(0), x)
    assert {leaf.shape for leaf in jax.tree.leaves(variables["_overwrite_with_gradient"])} == {(1,), (16,)}


def test_power_of_2_scales_are_those_of_the_recipe():
    x, w = sample(4, 8), sample(8, 5)
    rows = owg.fp8_dot_general(x, w, MATMUL, scaling="rowwise")
    exact = x @ w
    assert np.linalg.norm(rows - exact) < 0.06 * np.linalg.norm(exact)
    assert (rows != owg.fp8_dot_general(x, w, MATMUL, scaling=CurrentScaling(granularity="row"))).any()


def test_a_model_is_converted_by_a_filter_as_by_rules():
    def model():
        return nnx.Sequential(nnx.Linear(8, 8, rngs=nnx.Rngs(0)), nnx.Linear(8, 8, rngs=nnx.Rngs(1)))

    by_filter = fp8_nnx.convert_to_fp8(model(), lambda layer, name: name.endswith("1"), scaling="tensorwise")
    by_rules = fp8_nnx.convert_to_fp8(model(), ["*1"], scaling="tensorwise")
    for converted in (by_filter, by_rules):
        assert not hasattr(converted.layers[0].dot_general, "scaling")
        assert converted.layers[1].dot_general.scaling == CurrentScaling()
    with pytest.raises(Fp8Error, match="No layer to convert among 2"):
        fp8_nnx.convert_to_fp8(model(), lambda layer, name: False)


@pytest.mark.parametrize("fp8_format", ["HYBRID_FNUZ", "E4M3_FNUZ"])
def test_the_formats_of_mi300_run_in_all_three_products(fp8_format):
    x, w = sample(4, 8), sample(8, 5)
    scaling = CurrentScaling(fp8_format=fp8_format)

    def product(x, w):
        return owg.fp8_dot_general(x, w, MATMUL, scaling=scaling)

    dots = owg.assert_fp8_dots(jax.grad(lambda x, w: product(x, w).sum(), (0, 1)), x, w)
    assert all(dtype.name.endswith("fnuz") for dot in dots for dtype in dot.operands)
    # integers up to 8 are exact in all four formats, and so is the product of their codes
    random, ones = np.random.default_rng(1), owg.init_meta(DelayedScaling(amax_history_length=1))
    a, b, g = (jnp.asarray(random.integers(-8, 9, shape), jnp.float32) for shape in ((4, 8), (8, 5), (4, 5)))
    delayed = DelayedScaling(amax_history_length=1, fp8_format=fp8_format)
    y, back = jax.vjp(lambda a, b: owg.fp8_dot_general(a, b, MATMUL, meta=ones, scaling=delayed), a, b)
    for found, wanted in zip((y, *back(g)), (a @ b, g @ b.T, a.T @ g), strict=True):
        np.testing.assert_array_equal(found, wanted)
    out, pull = jax.vjp(product, x, w)
    exact, exact_pull = jax.vjp(jnp.matmul, x, w)
    g = sample(4, 5)
    for found, wanted in zip((out, *pull(g)), (exact, *exact_pull(g)), strict=True):
        assert np.linalg.norm(found - wanted) < 0.12 * np.linalg.norm(wanted)
