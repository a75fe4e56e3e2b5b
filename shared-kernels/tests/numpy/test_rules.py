"""Module rules: which names match, which rule wins, which rules are errors."""

import pytest

from fp8_common import RECIPES, Decision, Fp8Error, Recipe, Rule, Rules

MODEL = [
    "model.embed",
    "model.layers.0.attn.qkv",
    "model.layers.0.mlp.up",
    "model.layers.1.attn.qkv",
    "model.layers.1.mlp.up",
    "lm_head",
]


def chosen(rules):
    return [decision.fqn for decision in Rules.parse(rules).apply(MODEL) if decision.include]


@pytest.mark.parametrize(
    ("pattern", "matches"),
    [
        ("*", MODEL),
        ("lm_head", ["lm_head"]),
        ("model.layers.*", MODEL[1:5]),
        ("*.mlp.up", [MODEL[2], MODEL[4]]),
        ("model.layers.[0].*", MODEL[1:3]),
        ("model.layers.?.attn.qkv", [MODEL[1], MODEL[3]]),
        (r"re:model\.layers\.\d+\.mlp\..*", [MODEL[2], MODEL[4]]),
        ("re:.*(?=qkv)qkv", [MODEL[1], MODEL[3]]),
        ("re:lm|lm_head", ["lm_head"]),
    ],
)
def test_patterns_match_whole_names(pattern, matches):
    assert chosen([pattern]) == matches


def test_globs_know_case_and_take_dots_literally():
    assert not Rule.parse("LM_head").matches("lm_head")
    assert not Rule.parse("a.b").matches("aXb")
    assert not Rule.parse("layers").matches("layers.0")


@pytest.mark.parametrize(
    ("rules", "want"),
    [
        ([], MODEL),
        (["!lm_head"], MODEL[:-1]),
        (["!re:.*(embed|head)"], MODEL[1:5]),
        (["model.*", "!model.embed"], MODEL[1:5]),
        (["*", "!model.layers.*", "model.layers.0.*"], [MODEL[0], *MODEL[1:3], "lm_head"]),
    ],
)
def test_later_rules_win_and_only_exclusions_leave_the_rest_in(rules, want):
    assert chosen(rules) == want


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
def test_rules_are_written_as_they_are_read(text):
    assert str(Rule.parse(text)) == text
    assert Rule.parse(str(Rule.parse(text))) == Rule.parse(text)


def test_spaces_around_a_rule_do_not_matter():
    assert Rule.parse(" model.*=rowwise ") == Rule.parse("model.* = rowwise")


def test_parsing_twice_changes_nothing():
    rules = Rules.parse(["*", "!lm_head"])
    assert Rules.parse(rules) is rules
    assert Rules.parse(rules.rules) == rules


def test_a_rule_that_matched_nothing_is_a_warning_that_quotes_it():
    with pytest.warns(
        UserWarning, match=r"Module rule '!lm_haed' matched none of 6 modules \(such as: model\.embed"
    ) as w:
        Rules.parse(["*", "!lm_haed"]).apply(MODEL)
    assert w[0].filename == __file__
    with pytest.warns(UserWarning, match=r"matched none of 0 modules \(such as: none\)"):
        Rules.parse(["*"]).apply([])


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        (["a", "!a"], "Module rules 'a' and '!a' contradict each other"),
        (["a = mxfp8", "b", "a = rowwise"], "Module rules 'a = mxfp8' and 'a = rowwise' contradict"),
        (["a", "a = rowwise"], "Module rules 'a' and 'a = rowwise' contradict"),
    ],
)
def test_one_pattern_with_two_settings_is_an_error(rules, message):
    with pytest.raises(Fp8Error, match=message):
        Rules.parse(rules)


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        (
            ["!lm_head", "*"],
            r"Module rule '!lm_head' decides nothing: it matches 1 module\(s\), and later rules \('\*'\)",
        ),
        (["*.mlp.* = rowwise", "model.* = mxfp8"], r"'\*\.mlp\.\* = rowwise' decides nothing: it matches 2"),
        (["model.*", "!*.attn.*", "!*.mlp.*", "!*.embed"], "'model.*' decides nothing: it matches 5"),
    ],
)
def test_a_rule_contradicted_on_every_module_is_an_error(rules, message):
    with pytest.raises(Fp8Error, match=message):
        Rules.parse(rules).apply(MODEL)


def test_agreeing_rules_may_overlap_and_repeat():
    assert chosen(["*.mlp.*", "model.layers.*", "*.mlp.*"]) == MODEL[1:5]
    assert chosen(["model.layers.*", "!*.attn.*", "!model.layers.1.*"]) == [MODEL[2]]


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ("model.*", r"must be a list of strings, got the string 'model\.\*'"),
        ([3], "must be a string or a Rule, got 3"),
        ([""], "needs a pattern, got an empty one"),
        (["!"], "needs a pattern, got an empty one"),
        (["re:("], r"'re:\(' is not a regular expression: missing \)"),
        (["* = fast"], "Unknown recipe 'fast'. Use one of tensorwise"),
        (["!* = mxfp8"], r"'!\* = mxfp8' excludes, so it cannot name a recipe"),
    ],
)
def test_unreadable_rules_are_refused(rules, message):
    with pytest.raises(Fp8Error, match=message):
        Rules.parse(rules)
