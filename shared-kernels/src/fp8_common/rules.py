r"""`Rules`: ordered include and exclude patterns over module names.

A rule is written as one string:

| text | meaning |
|---|---|
| `layers.*.mlp.*` | include; a glob: `*` any characters (dots too), `?` one, `[01]` one of these |
| `re:layers\.\d+\.mlp\..*` | include; a regular expression |
| `!lm_head` | exclude; works before `re:` too |
| `layers.*.attn.* = rowwise` | include with a named recipe instead of the caller's |

Patterns match the whole name. Later rules win, so the general rule comes first and its exceptions after it. A
name that no rule matches is included only if every rule excludes ("everything but lm_head").
"""

import dataclasses
import fnmatch
import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Self

from fp8_common.errors import Fp8Error
from fp8_common.recipe import Recipe, get_recipe

_WITH_RECIPE = re.compile(r"(?P<pattern>.*?)\s*=\s*(?P<recipe>\w+)")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """One include or exclude rule.

    Attributes:
        pattern: A glob, or a regular expression after "re:".
        include: False excludes the matches.
        recipe: The recipe of included modules; None leaves it to the caller.
    """

    pattern: str
    include: bool = True
    recipe: Recipe | None = None

    def __post_init__(self) -> None:
        """Raise for patterns without matches and exclusions with a recipe."""
        if not self.pattern:
            raise Fp8Error("A module rule needs a pattern, got an empty one. Use '*' for every module.")
        if self.recipe is not None and not self.include:
            raise Fp8Error(f"Module rule {str(self)!r} excludes, so it cannot name a recipe. Remove one of the two.")
        _compiled(self.pattern)

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read one rule as written in the module docstring.

        Raises:
            Fp8Error: The pattern is empty or no regular expression, the recipe is unknown, or an exclusion
                has one.
        """
        if not isinstance(text, str):
            raise Fp8Error(f"A module rule must be a string or a Rule, got {text!r}.")
        # The recipe is split off first, since the pattern before it may hold anything; then "!", then "re:".
        pattern, recipe = text.strip(), None
        if written := _WITH_RECIPE.fullmatch(pattern):
            pattern, recipe = written["pattern"], get_recipe(written["recipe"])
        return cls(pattern=pattern.removeprefix("!"), include=not pattern.startswith("!"), recipe=recipe)

    def matches(self, fqn: str) -> bool:
        """Return whether the pattern matches the whole name."""
        return _compiled(self.pattern).fullmatch(fqn) is not None

    @property
    def setting(self) -> tuple[bool, Recipe | None]:
        """The outcome of the rule; equal outcomes never contradict."""
        return self.include, self.recipe

    def __str__(self) -> str:
        """Return the rule as `parse` reads it."""
        recipe = f" = {self.recipe.name}" if self.recipe else ""
        return f"{'' if self.include else '!'}{self.pattern}{recipe}"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """Decision of the rules for one module.

    Attributes:
        fqn: The module's fully qualified name.
        include: Whether the module is converted.
        recipe: The recipe that its rule names; None leaves it to the caller.
        rule: The rule that decided; None if no rule matched.
    """

    fqn: str
    include: bool
    recipe: Recipe | None = None
    rule: Rule | None = None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Rules:
    """Module rules in order; later ones win.

    Attributes:
        rules: The rules.
    """

    rules: tuple[Rule, ...] = ()

    def __post_init__(self) -> None:
        """Raise if one pattern has two settings.

        The first could never act.
        """
        seen: dict[str, Rule] = {}
        for rule in self.rules:
            other = seen.setdefault(rule.pattern, rule)
            if other.setting != rule.setting:
                raise Fp8Error(f"Module rules {str(other)!r} and {str(rule)!r} contradict each other. Remove one.")

    @classmethod
    def parse(cls, rules: "Rules | Iterable[str | Rule]") -> "Rules":
        """Read rules, as strings or as `Rule` objects.

        Raises:
            Fp8Error: A rule cannot be read, or two contradict each other.
        """
        if isinstance(rules, Rules):
            return rules
        if isinstance(rules, str):
            raise Fp8Error(f"Module rules must be a list of strings, got the string {rules!r}. Put it in a list.")
        return cls(rules=tuple(rule if isinstance(rule, Rule) else Rule.parse(rule) for rule in rules))

    def match(self, fqn: str) -> Decision:
        """Return the rules' decision for one module."""
        for rule in reversed(self.rules):  # later rules win
            if rule.matches(fqn):
                return Decision(fqn=fqn, include=rule.include, recipe=rule.recipe, rule=rule)
        # A list of exceptions alone means "everything but these"; with any include, only included modules.
        return Decision(fqn=fqn, include=not any(rule.include for rule in self.rules))

    def apply(self, names: Iterable[str]) -> list[Decision]:
        """Return the rules' decisions for modules, in order of `names`.

        Warns:
            UserWarning: For each rule that matches none of the names.

        Raises:
            Fp8Error: A rule matches names, but later rules with other settings decide all of them.
        """
        decisions = [self.match(name) for name in names]
        for rule in self.rules:
            self._check_effect(rule, decisions)
        return decisions

    def _check_effect(self, rule: Rule, decisions: Sequence[Decision]) -> None:
        matched = [decision for decision in decisions if rule.matches(decision.fqn)]
        if not matched:
            names = ", ".join(decision.fqn for decision in decisions[:3]) or "none"
            warnings.warn(
                f"Module rule {str(rule)!r} matched none of {len(decisions)} modules (such as: {names}). "
                "Patterns must match the whole name; correct or remove the rule.",
                UserWarning,
                stacklevel=3,
            )
            return
        # A rule that never wins is an error only where the winners disagree with it; otherwise it is redundant.
        winners = {str(decision.rule): decision.rule for decision in matched if decision.rule is not None}
        if all(winner.setting != rule.setting for winner in winners.values()):
            raise Fp8Error(
                f"Module rule {str(rule)!r} has no effect: it matches {len(matched)} module(s), and later "
                f"rules ({', '.join(map(repr, winners))}) contradict it on every one. "
                "Later rules win: put the general rule first, or remove one."
            )


def select_modules(
    modules: Mapping[str, Any], keep: "Callable[[Any, str], bool] | Rules | Iterable[str | Rule] | None"
) -> dict[str, Decision]:
    """Return the decision of a filter or rules for each module.

    For every module that could be converted, by its name.

    Args:
        modules: The modules by fully qualified name.
        keep: Called with (module, name), False leaves the module unchanged; or rules; None includes all.

    Warns:
        UserWarning: For each rule that matches no name.

    Raises:
        Fp8Error: A rule cannot be read, or has no effect.
    """
    if keep is None or callable(keep):
        included = {name: keep is None or bool(keep(module, name)) for name, module in modules.items()}
        return {name: Decision(fqn=name, include=include) for name, include in included.items()}
    return {decision.fqn: decision for decision in Rules.parse(keep).apply(modules)}


@lru_cache(maxsize=1024)
def _compiled(pattern: str) -> re.Pattern[str]:
    if not pattern.startswith("re:"):
        # Translated here, because `fnmatch.fnmatch` changes case and slashes on Windows.
        return re.compile(fnmatch.translate(pattern))
    try:
        return re.compile(pattern[3:])
    except re.error as error:
        raise Fp8Error(f"Module rule {pattern!r} is not a regular expression: {error}.") from error
