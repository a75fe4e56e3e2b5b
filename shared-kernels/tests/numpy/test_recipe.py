"""Recipes: refused combinations, the named ones, and JSON round trips."""

import dataclasses
import json

import pytest

from fp8_common import CANONICAL, POWER_OF_2, PRESETS, RECIPES, CastRecipe, Fp8Error, Recipe, ScalePolicy, get_recipe
from fp8_common.presets import deepgemm, flax, mx, te_delayed
from fp8_common.recipe import PRODUCTS

DELAYED = dataclasses.replace(CANONICAL, history=16)


def through_json(record):
    return type(record).from_dict(json.loads(json.dumps(record.to_dict(), allow_nan=False)))


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=lambda recipe: recipe.name)
def test_named_recipes_survive_json(recipe):
    again = through_json(recipe)
    assert again == recipe
    assert hash(again) == hash(recipe)
    assert get_recipe(recipe.name) is get_recipe(recipe) is recipe


@pytest.mark.parametrize(
    "policy",
    [CANONICAL, POWER_OF_2, ScalePolicy(margin=-3, eps=2.0**-126, lower=0.5), *(make() for make in PRESETS.values())],
    ids=lambda policy: policy.name,
)
def test_policies_survive_json_with_infinite_limits(policy):
    assert through_json(policy) == policy


def test_infinity_is_a_string_because_json_has_none():
    assert flax().to_dict()["upper"] == "inf"
    assert ScalePolicy.from_dict({"upper": "inf"}).upper == float("inf")


def test_left_out_fields_take_their_defaults_and_whole_numbers_serve_as_floats():
    assert ScalePolicy.from_dict({}) == CANONICAL
    assert Recipe.from_dict({"name": "tensorwise"}) == RECIPES["tensorwise"]
    assert ScalePolicy.from_dict({"upper": 4}).upper == 4.0


CASTS = {
    "tensorwise": ("e4m3", "dynamic", "tensorwise"),
    "rowwise": ("e4m3", "dynamic", "rowwise"),
    "blockwise": ("e4m3", "dynamic", "blockwise_1x128"),
    "mxfp8": ("e4m3", "dynamic", "mx"),
    "tensorwise_delayed": ("e4m3", "delayed", "tensorwise"),
    "rowwise_with_gw_hp": ("e4m3", "dynamic", "rowwise"),
}


@pytest.mark.parametrize("name", RECIPES)
def test_what_the_named_recipes_are(name):
    recipe = RECIPES[name]
    assert (recipe.input.format, recipe.input.scaling, recipe.input.granularity) == CASTS[name]
    assert recipe.grad_output.format == ("e5m2" if name.startswith("tensorwise") else "e4m3")
    assert recipe.weight.granularity == ("blockwise_128x128" if name == "blockwise" else recipe.input.granularity)
    high_precision = [product for product in PRODUCTS if not recipe.operands(product)[0].enabled]
    assert high_precision == (["grad_weight"] if name == "rowwise_with_gw_hp" else [])


def test_policies_of_the_named_recipes():
    assert RECIPES["tensorwise_delayed"].weight.policy.history == 16
    assert RECIPES["rowwise"].input.policy == POWER_OF_2
    assert RECIPES["mxfp8"].input.policy == mx("rceil")
    assert RECIPES["tensorwise"].grad_output.policy == CANONICAL


def test_operands_follow_the_products_and_their_overrides():
    recipe = Recipe(
        name="mine",
        input_for_grad_weight=CastRecipe(granularity="rowwise"),
        weight_for_grad_input=CastRecipe(format="e5m2"),
        grad_output=CastRecipe(),
        grad_output_for_grad_weight=CastRecipe(format="e5m2", granularity="rowwise"),
    )
    assert recipe.operands("output") == (recipe.input, recipe.weight)
    assert recipe.operands("grad_input") == (recipe.grad_output, recipe.weight_for_grad_input)
    assert recipe.operands("grad_weight") == (recipe.input_for_grad_weight, recipe.grad_output_for_grad_weight)
    assert through_json(recipe) == recipe
    with pytest.raises(Fp8Error, match="product must be one of output, grad_input, grad_weight, got 'forward'"):
        recipe.operands("forward")


def test_formats_are_named_shortly_and_found():
    cast = CastRecipe(format="float8_e5m2")
    assert cast.format == "e5m2"
    assert cast.fp8_format.max == 57344


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"format": "e8m0"}, "E8M0 holds block scales"),
        ({"format": "fp8"}, "Unknown FP8 format 'fp8'"),
        ({"scaling": "late"}, "scaling must be one of 'dynamic', 'delayed', 'static', 'disabled', got 'late'"),
        ({"granularity": "row"}, "granularity must be one of 'tensorwise', 'rowwise'"),
        ({"scaling": "static"}, 'static_scale belongs to scaling="static"'),
        ({"static_scale": 2.0}, "got scaling='dynamic' and static_scale=2.0"),
        ({"scaling": "static", "static_scale": 0.0}, "static_scale must be a positive normal float32, got 0.0"),
        ({"scaling": "static", "static_scale": float("inf")}, "static_scale must be a positive normal float32"),
        ({"scaling": "static", "static_scale": 1e-40}, "static_scale must be a positive normal float32"),
        ({"scaling": "static", "static_scale": 1.0, "granularity": "rowwise"}, "keeps one scale for each tensor"),
        ({"scaling": "delayed"}, 'scaling="delayed" needs a policy with history >= 1.*history=0'),
        ({"policy": te_delayed()}, "got scaling='dynamic' and history=1024"),
        ({"scaling": "delayed", "policy": DELAYED, "granularity": "rowwise"}, "keeps one scale for each tensor"),
        ({"granularity": "mx"}, 'granularity="mx" and a policy made by mx'),
        ({"policy": mx()}, 'granularity="mx" and a policy made by mx'),
    ],
)
def test_casts_refuse_combinations_that_mean_nothing(settings, message):
    with pytest.raises(Fp8Error, match=message):
        CastRecipe(**settings)


def test_static_scaling_takes_a_number():
    cast = CastRecipe(scaling="static", static_scale=2)
    assert through_json(cast) == cast


OFF, ROWS, MX = CastRecipe(scaling="disabled"), CastRecipe(granularity="rowwise"), RECIPES["mxfp8"].input


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"input": OFF}, "Recipe 'r', product 'output': one operand is FP8 and the other is not"),
        ({"grad_output": OFF}, "product 'grad_input': one operand is FP8"),
        ({"input_for_grad_weight": OFF}, "product 'grad_weight': one operand is FP8"),
        ({"input": MX}, "granularities 'mx' and 'tensorwise' do not multiply"),
        ({"weight": CastRecipe(granularity="blockwise_128x128")}, "'tensorwise' and 'blockwise_128x128' do not"),
        ({"input": CastRecipe(format="e4m3fnuz")}, "e4m3fnuz and e4m3 do not multiply. Use FNUZ formats on both"),
        ({"weight": CastRecipe(format="e5m2")}, "product 'grad_input': no hardware multiplies e5m2 by e5m2"),
    ],
)
def test_recipes_refuse_operands_that_do_not_multiply(settings, message):
    with pytest.raises(Fp8Error, match=message):
        Recipe(name="r", **settings)


def test_tensorwise_and_rowwise_operands_multiply():
    assert Recipe(name="r", input=ROWS).input.granularity == "rowwise"
    assert Recipe(name="off", input=OFF, weight=OFF, grad_output=OFF).input.enabled is False


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({}, "Recipe needs 'name', got nothing"),
        ({"schema": 1, "name": "x"}, "Recipe does not know 'schema'"),
        ({"name": 3}, "Recipe.name must be of type str, got 3"),
        ({"name": "x", "colour": 1}, "Recipe does not know 'colour'. It has name, input"),
        ({"name": "x", "input": {"policy": {"x": 1, "a": 2}}}, "ScalePolicy does not know 'a', 'x'"),
        ({"name": "x", "input": []}, "CastRecipe must be read from a dictionary, got list"),
        ({"name": "x", "input": None}, "CastRecipe must be read from a dictionary, got NoneType"),
        ({"name": "x", "input": {"scaling": 1}}, "CastRecipe.scaling must be one of"),
        ({"name": "x", "input": {"policy": {"margin": "1"}}}, "ScalePolicy.margin must be of type int"),
        ({"name": "x", "input": {"policy": {"margin": True}}}, "ScalePolicy.margin must be of type int"),
        ({"name": "x", "input": {"policy": {"eps": "tiny"}}}, "ScalePolicy.eps must be of type float"),
        ({"name": "x", "input": {"policy": {"power_of_2": 1}}}, "ScalePolicy.power_of_2 must be of type"),
        ([], "Recipe must be read from a dictionary, got list"),
    ],
)
def test_dictionaries_that_say_something_else_are_refused(data, message):
    with pytest.raises(Fp8Error, match=message):
        Recipe.from_dict(data)


def test_an_unknown_recipe_is_refused_with_the_known_ones():
    with pytest.raises(Fp8Error, match=r"Unknown recipe 'rows'\. Use one of tensorwise, tensorwise_delayed, rowwise"):
        get_recipe("rows")


def test_records_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        RECIPES["mxfp8"].name = "other"
    with pytest.raises((dataclasses.FrozenInstanceError, TypeError)):
        deepgemm().colour = 1
