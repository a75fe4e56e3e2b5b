"""Module rules: which names match, which rule wins, which rules are errors."""

import pytest

from fp8_common import RECIPES, Fp8Error, Recipe, Rules
from fp8_common.rules import Decision, Rule

MODEL = [
    "model.embed",
    "model.layers.0.attn.qkv",
    "model.layers.0.mlp.up",
    "model.layers.1.attn.qkv",
    "model.layers.1.mlp.up",
    "lm_head",
]


@pytest.mark.parametrize(
    ("rules", "want"),
    [
        # patterns match whole names, with case, and take dots literally
        (["*"], MODEL),
        (["lm_head"], ["lm_head"]),
        (["model.layers.*"], MODEL[1:5]),
        (["*.mlp.up"], [MODEL[2], MODEL[4]]),
        (["model.layers.[0].*"], MODEL[1:3]),
        (["model.layers.?.attn.qkv"], [MODEL[1], MODEL[3]]),
        ([r"re:model\.layers\.\d+\.mlp\..*"], [MODEL[2], MODEL[4]]),
        # later rules win, and only exclusions leave the rest in
        ([], MODEL),
        (["!lm_head"], MODEL[:-1]),
        (["!re:.*(embed|head)"], MODEL[1:5]),
        (["model.*", "!model.embed"], MODEL[1:5]),
        (["*", "!model.layers.*", "model.layers.0.*"], [MODEL[0], *MODEL[1:3], "lm_head"]),
        # agreeing rules may overlap and repeat
        (["*.mlp.*", "model.layers.*", "*.mlp.*"], MODEL[1:5]),
        (["model.layers.*", "!*.attn.*", "!model.layers.1.*"], [MODEL[2]]),
    ],
)
def test_which_modules_are_chosen(rules, want):
    assert [decision.fqn for decision in Rules.parse(rules).apply(MODEL) if decision.include] == want


@pytest.mark.parametrize(("pattern", "name"), [("LM_head", "lm_head"), ("a.b", "aXb"), ("layers", "layers.0")])
def test_globs_know_case_and_take_dots_literally(pattern, name):
    assert not Rule.parse(pattern).matches(name)


def test_rules_may_name_recipes():
    mine = Recipe(name="mine")
    rules = Rules.parse(["* = tensorwise", "*.mlp.* = rowwise", Rule(pattern="lm_head", recipe=mine), "!*.embed"])
    found = {decision.fqn: decision.recipe for decision in rules.apply(MODEL)}
    assert found["model.layers.0.attn.qkv"] is RECIPES["tensorwise"]
    assert found["model.layers.1.mlp.up"] is RECIPES["rowwise"]
    assert found["lm_head"] is mine
    assert found["model.embed"] is None


def test_decisions_name_their_rule():
    rules = Rules.parse(["model.*", "!model.embed"])
    assert rules.match("model.embed") == Decision(fqn="model.embed", include=False, rule=rules.rules[1])
    assert rules.match("other") == Decision(fqn="other", include=False)
    assert Rules.parse(["!x"]).match("other") == Decision(fqn="other", include=True)


@pytest.mark.parametrize("text", ["*", "!lm_head", "re:a.*b", "!re:x", "model.* = rowwise", "re:(?=a)a = mxfp8"])
def test_rules_are_written_unchanged_read(text):
    rules = Rules.parse([text])
    assert Rules.parse(rules) is rules
    assert Rules.parse(rules.rules) == Rules.parse([f" {text.replace(' = ', '=')} "]) == rules
    assert str(rules.rules[0]) == text


def test_a_rule_that_matched_nothing_is_a_warning_that_quotes_it():
    quoted = r"Module rule '!lm_haed' matched none of 6 modules \(such as: model\.embed"
    with pytest.warns(UserWarning, match=quoted) as w:
        Rules.parse(["*", "!lm_haed"]).apply(MODEL)
    assert w[0].filename == __file__
    with pytest.warns(UserWarning, match=r"matched none of 0 modules \(such as: none\)"):
        Rules.parse(["*"]).apply([])


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ("model.*", r"must be a list of strings, got the string 'model\.\*'"),
        ([3], "must be a string or a Rule, got 3"),
        ([""], "needs a pattern, got an empty one"),
        (["re:("], r"'re:\(' is not a regular expression: missing \)"),
        (["* = fast"], "Unknown recipe 'fast'. Use one of tensorwise"),
        (["!* = mxfp8"], r"'!\* = mxfp8' excludes, so it cannot name a recipe"),
        # one pattern with two settings
        (["a", "!a"], "Module rules 'a' and '!a' contradict each other"),
        (["a = mxfp8", "b", "a = rowwise"], "Module rules 'a = mxfp8' and 'a = rowwise' contradict"),
        # a rule that is contradicted on every module
        (["!lm_head", "*"], r"'!lm_head' has no effect: later rules \('\*'\) override it for all 1 "),
        (["*.mlp.* = rowwise", "model.* = mxfp8"], r"'\*\.mlp\.\* = rowwise' has no effect: .* for all 2 modules"),
        (["model.*", "!*.attn.*", "!*.mlp.*", "!*.embed"], "'model.*' has no effect: .* for all 5 modules"),
    ],
)
def test_rules_that_are_invalid_raise(rules, message):
    with pytest.raises(Fp8Error, match=message):
        Rules.parse(rules).apply(MODEL)
