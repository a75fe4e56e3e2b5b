"""Arbitrary text and dictionaries as input: the result is a value or one `Fp8Error`, never another exception."""

import contextlib
import json
import warnings

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings

from fp8_common import RECIPES, Fp8Error, Recipe, Rules

# what is nearly right is refused in more places than noise
PLAIN = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
JSON = st.recursive(
    PLAIN | st.sampled_from(["inf", "e4m3", 10**400]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
PATTERNS = st.text(max_size=30) | st.text("abc.*?[]^$()|+{}\\=,!:- \n", max_size=30)
RULE = PATTERNS | PATTERNS.map("re:{}".format) | st.sampled_from(["* = rowwise", "[", "[!]", "!"])


@st.composite
def damaged(draw):
    """The dictionary of a recipe with one place of it replaced, removed or added."""
    data = place = draw(st.sampled_from(list(RECIPES.values()))).to_dict()
    key = draw(st.sampled_from([*sorted(place), "surprise"]))
    while isinstance(place.get(key), dict) and draw(st.booleans()):
        place = place[key]
        key = draw(st.sampled_from([*sorted(place), "surprise"]))
    if draw(st.booleans()):
        place[key] = draw(JSON)
    else:
        place.pop(key, None)
    return data


def read(data):
    found = Recipe.from_dict(data)
    assert isinstance(found, Recipe)
    assert Recipe.from_dict(json.loads(json.dumps(found.to_dict()))) == found


def match(texts):
    rules = Rules.parse(texts)
    assert Rules.parse([str(rule) for rule in rules.rules]) == rules
    rules.apply(["", "a", "layers.0.mlp"])


CHECKS = {
    "a damaged recipe": (read, damaged()),
    "anything as a recipe": (read, JSON),
    "rules": (match, st.lists(RULE, max_size=4)),
}


@pytest.mark.parametrize("name", CHECKS)
def test_a_value_or_one_error(name, full):
    check, values = CHECKS[name]

    # tables of characters are built once, on the first draw
    @settings(max_examples=5000 if full else 60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(values)
    def never_another_exception(value):
        # rules that match nothing warn, and Python does about odd regular expressions
        with contextlib.suppress(Fp8Error), warnings.catch_warnings(action="ignore"):
            check(value)

    never_another_exception()
