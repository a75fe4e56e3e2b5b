"""Recipes: refused combinations, the named ones, and JSON round trips."""

import dataclasses
import json
import math

import pytest

from fp8_common import CANONICAL, POWER_OF_2, RECIPES, CastRecipe, Fp8Error, Recipe, ScalePolicy
from fp8_common.presets import PRESETS, mx, te_delayed
from fp8_common.recipe import PRODUCTS, get_recipe

DELAYED = dataclasses.replace(CANONICAL, history=16)
OFF, ROWS, MX = CastRecipe(scaling="disabled"), CastRecipe(granularity="rowwise"), RECIPES["mxfp8"].input
E5M2 = CastRecipe(format="e5m2")
MINE = Recipe(
    name="mine",
    input_for_grad_weight=ROWS,
    weight_for_grad_input=E5M2,
    grad_output=CastRecipe(),
    grad_output_for_grad_weight=CastRecipe(format="e5m2", granularity="rowwise"),
)
RECORDS = {
    **RECIPES,
    "overrides": MINE,
    "rows beside one scale": Recipe(name="r", input=ROWS),
    "nothing in FP8": Recipe(name="off", input=OFF, weight=OFF, grad_output=OFF),
    "a static scale, which may be a whole number": CastRecipe(scaling="static", static_scale=2),
    "canonical": CANONICAL,
    "power of 2": POWER_OF_2,
    "numbers at their limits": ScalePolicy(margin=-3, eps=2.0**-126, lower=0.5),
    **{f"preset {name}": make() for name, make in PRESETS.items()},
}


@pytest.mark.parametrize("name", RECORDS)
def test_records_survive_json_and_are_frozen(name):
    record = RECORDS[name]
    again = type(record).from_dict(json.loads(json.dumps(record.to_dict(), allow_nan=False)))
    assert again == record
    assert hash(again) == hash(record)
    with pytest.raises((dataclasses.FrozenInstanceError, TypeError)):
        record.name = "other"


def test_left_out_fields_take_their_defaults_and_infinity_is_a_string_because_json_has_none():
    assert ScalePolicy.from_dict({}) == CANONICAL
    assert Recipe.from_dict({"name": "tensorwise"}) == RECIPES["tensorwise"]
    assert ScalePolicy.from_dict({"upper": 4}).upper == 4.0
    assert ScalePolicy.from_dict({"upper": "inf"}).upper == float("inf")
    assert ScalePolicy(upper=math.inf).to_dict()["upper"] == "inf"
    assert CastRecipe(format="float8_e5m2") == E5M2
    assert E5M2.fp8_format.max == 57344


# name: format, scaling and granularity of the input, granularity of the weight, format of gradients, policy of weights
NAMED = {
    "tensorwise": ("e4m3", "dynamic", "tensorwise", "tensorwise", "e5m2", CANONICAL),
    "rowwise": ("e4m3", "dynamic", "rowwise", "rowwise", "e4m3", POWER_OF_2),
    "blockwise": ("e4m3", "dynamic", "blockwise_1x128", "blockwise_128x128", "e4m3", CANONICAL),
    "mxfp8": ("e4m3", "dynamic", "mx", "mx", "e4m3", mx("rceil")),
    "tensorwise_delayed": ("e4m3", "delayed", "tensorwise", "tensorwise", "e5m2", DELAYED),
    "rowwise_with_gw_hp": ("e4m3", "dynamic", "rowwise", "rowwise", "e4m3", POWER_OF_2),
}


@pytest.mark.parametrize("name", RECIPES)
def test_named_recipes(name):
    recipe = RECIPES[name]
    assert get_recipe(name) is get_recipe(recipe) is recipe
    x, w = recipe.input, recipe.weight
    assert (x.format, x.scaling, x.granularity, w.granularity, recipe.grad_output.format, w.policy) == NAMED[name]
    high_precision = [product for product in PRODUCTS if not recipe.operands(product)[0].enabled]
    assert high_precision == (["grad_weight"] if name == "rowwise_with_gw_hp" else [])


def test_operands_follow_the_matmuls_and_their_overrides():
    assert MINE.operands("output") == (MINE.input, MINE.weight)
    assert MINE.operands("grad_input") == (MINE.grad_output, MINE.weight_for_grad_input)
    assert MINE.operands("grad_weight") == (MINE.input_for_grad_weight, MINE.grad_output_for_grad_weight)


def cast(**settings):
    return lambda: CastRecipe(**settings)


def recipe(**settings):
    return lambda: Recipe(name="r", **settings)


def read(**data):
    return lambda: Recipe.from_dict(data)


def read_policy(**data):
    return lambda: Recipe.from_dict({"name": "x", "input": {"policy": data}})


STATIC = {"scaling": "static"}
REFUSED = [
    (cast(format="e8m0"), "E8M0 holds block scales"),
    (cast(scaling="late"), "scaling must be one of 'dynamic', 'delayed', 'static', 'disabled', got 'late'"),
    (cast(granularity="row"), "granularity must be one of 'tensorwise', 'rowwise'"),
    (cast(**STATIC), 'static_scale is required for scaling="static"'),
    (cast(static_scale=2.0), "got scaling='dynamic' and static_scale=2.0"),
    (cast(**STATIC, static_scale=0.0), "static_scale must be a positive normal float32, got 0.0"),
    (cast(**STATIC, static_scale=1e-40), "static_scale must be a positive normal float32"),
    (cast(**STATIC, static_scale=1.0, granularity="rowwise"), "keeps one scale for each tensor"),
    (cast(scaling="delayed"), 'scaling="delayed" needs a policy with history >= 1.*history=0'),
    (cast(policy=te_delayed()), "got scaling='dynamic' and history=1024"),
    (cast(scaling="delayed", policy=DELAYED, granularity="rowwise"), "keeps one scale for each tensor"),
    (cast(granularity="mx"), 'granularity="mx" and a policy from presets.mx'),
    (cast(policy=mx()), 'granularity="mx" and a policy from presets.mx'),
    # operands that do not multiply
    (recipe(input=OFF), "Recipe 'r', matmul 'output': one operand is FP8 and the other is not"),
    (recipe(input_for_grad_weight=OFF), "matmul 'grad_weight': one operand is FP8"),
    (recipe(input=MX), "granularities 'mx' and 'tensorwise' cannot be combined"),
    (recipe(weight=CastRecipe(granularity="blockwise_128x128")), "'tensorwise' and 'blockwise_128x128' cannot"),
    (recipe(input=CastRecipe(format="e4m3fnuz")), "formats e4m3fnuz and e4m3 cannot be combined"),
    (recipe(weight=E5M2), "matmul 'grad_input': no hardware multiplies e5m2 by e5m2"),
    # dictionaries that say something else
    (read(), "Recipe needs 'name', got nothing"),
    (read(schema=1, name="x"), "Recipe has no field 'schema'"),
    (read(name=3), "Recipe.name must be of type str, got 3"),
    (read(name="x", colour=1), "Recipe has no field 'colour'. Known fields: name, input"),
    (read(name="x", input=[]), "CastRecipe must be read from a dictionary, got list"),
    (read(name="x", input={"scaling": 1}), "CastRecipe.scaling must be one of"),
    (read_policy(x=1, a=2), "ScalePolicy has no field 'a', 'x'"),
    (read_policy(margin="1"), "ScalePolicy.margin must be of type int"),
    (read_policy(margin=True), "ScalePolicy.margin must be of type int"),
    (lambda: get_recipe("rows"), r"Unknown recipe 'rows'\. Use one of tensorwise, tensorwise_delayed, rowwise"),
    (lambda: MINE.operands("forward"), "matmul must be one of output, grad_input, grad_weight, got 'forward'"),
]


@pytest.mark.parametrize(("make", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_invalid_values_raise(make, message):
    with pytest.raises(Fp8Error, match=message):
        make()


@pytest.mark.parametrize(
    "record", [CANONICAL, POWER_OF_2, mx(), CastRecipe(), *RECIPES.values()], ids=lambda r: getattr(r, "name", "cast")
)
def test_a_repr_is_short_and_makes_the_record(record):
    names = {type(each).__name__: type(each) for each in (CANONICAL, CastRecipe(), RECIPES["rowwise"])}
    assert eval(repr(record), names) == record
    assert repr(ScalePolicy()) == "ScalePolicy()"
    assert len(repr(CastRecipe(policy=POWER_OF_2))) < 80
