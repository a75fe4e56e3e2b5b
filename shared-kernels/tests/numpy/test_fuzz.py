"""Arbitrary text and dictionaries as input: the result is a value or one `Fp8Error`, never another exception."""

import contextlib
import json
import warnings

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings

from fp8_common import RECIPES, CastRecipe, Fp8Error, Recipe, Rules, ScalePolicy

# what is nearly right is refused in more places than noise
PLAIN = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
JSON = st.recursive(
    PLAIN | st.sampled_from(["inf", "e4m3", 10**400]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
PATTERNS = st.text(max_size=30) | st.text("abc.*?[]^$()|+{}\\=,!:- \n", max_size=30)
RULE = PATTERNS | PATTERNS.map("re:{}".format) | st.sampled_from(["* = rowwise", "[", "[!]", "!"])
RULES = st.lists(RULE, max_size=4)


@pytest.fixture
def fuzz(full):
    """Run a check on many values of a strategy: more where the whole matrix was asked for."""

    def run(check, **strategies):
        slow = [HealthCheck.too_slow]  # tables of characters are built once, on the first draw
        several = settings(max_examples=5000 if full else 150, deadline=None, suppress_health_check=slow)
        several(given(**strategies)(check))()

    return run


@st.composite
def damaged(draw):
    """The dictionary of a recipe with one place of it replaced, removed or added."""
    data = draw(st.sampled_from(list(RECIPES.values()))).to_dict()
    place = data
    key = draw(st.sampled_from([*sorted(place), "surprise"]))
    while isinstance(place.get(key), dict) and draw(st.booleans()):
        place = place[key]
        key = draw(st.sampled_from([*sorted(place), "surprise"]))
    if draw(st.booleans()):
        place[key] = draw(JSON)
    else:
        place.pop(key, None)
    return data


def answer(read, value):
    """Return what `read` makes of its input, or None if it refuses; any other exception fails the test."""
    with contextlib.suppress(Fp8Error):
        return read(value)
    return None


def test_damaged_recipes(fuzz):
    def check(data):
        recipe = answer(Recipe.from_dict, data)
        if recipe is not None:
            assert Recipe.from_dict(json.loads(json.dumps(recipe.to_dict()))) == recipe

    fuzz(check, data=damaged())


@pytest.mark.parametrize("record", [Recipe, CastRecipe, ScalePolicy])
def test_anything_as_a_record(fuzz, record):
    def check(data):
        record_or_none = answer(record.from_dict, data)
        assert record_or_none is None or isinstance(record_or_none, record)

    fuzz(check, data=JSON)


def test_rules(fuzz):
    def check(texts):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # rules that match nothing, and Python about odd regular expressions
            rules = answer(Rules.parse, texts)
            if rules is not None:
                assert Rules.parse([str(rule) for rule in rules.rules]) == rules
                answer(rules.apply, ["", "a", "layers.0.mlp"])

    fuzz(check, texts=RULES)
