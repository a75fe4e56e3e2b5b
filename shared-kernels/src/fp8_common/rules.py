r"""`Rules`: ordered include and exclude patterns over module names.

A rule is written as one string:

| text | meaning |
|---|---|
| `layers.*.mlp.*` | include by a glob: `*` is any characters, also dots, `?` one character, `[01]` one of these |
| `re:layers\.\d+\.mlp\..*` | include by a regular expression |
| `!lm_head` | exclude; also possible before `re:` |
| `layers.*.attn.* = rowwise` | include, with a recipe by name instead of the caller's |

A pattern must match the whole name. The last matching rule wins, so write the general rule first and its exceptions
after it. A name that no rule matches is included only if all rules exclude ("all but lm_head").
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
        pattern: Glob, or "re:" and a regular expression.
        include: Whether to include or to exclude the modules that match.
        recipe: Recipe of included modules; None selects the caller's.
    """

    pattern: str
    include: bool = True
    recipe: Recipe | None = None

    def __post_init__(self) -> None:
        """Validate the fields."""
        if not self.pattern:
            raise Fp8Error("A module rule needs a pattern, got an empty one. Use '*' for every module.")
        if self.recipe is not None and not self.include:
            raise Fp8Error(f"Module rule {str(self)!r} excludes, so it cannot name a recipe. Remove one of the two.")
        _compiled(self.pattern)

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse one rule, in the syntax of the module docstring.

        Raises:
            Fp8Error: If the pattern is empty or an invalid regular expression, the recipe is unknown, or an exclusion
                has a recipe.
        """
        if not isinstance(text, str):
            raise Fp8Error(f"A module rule must be a string or a Rule, got {text!r}.")
        # The recipe is split off first, because the pattern before it may have any characters; then "!", then "re:".
        pattern, recipe = text.strip(), None
        if written := _WITH_RECIPE.fullmatch(pattern):
            pattern, recipe = written["pattern"], get_recipe(written["recipe"])
        return cls(pattern=pattern.removeprefix("!"), include=not pattern.startswith("!"), recipe=recipe)

    def matches(self, fqn: str) -> bool:
        """Return whether the pattern matches the whole name."""
        return _compiled(self.pattern).fullmatch(fqn) is not None

    @property
    def setting(self) -> tuple[bool, Recipe | None]:
        """Decision of the rule for the modules that match: (include, recipe)."""
        return self.include, self.recipe

    def __str__(self) -> str:
        """Return the rule in the syntax of `parse`."""
        recipe = f" = {self.recipe.name}" if self.recipe else ""
        return f"{'' if self.include else '!'}{self.pattern}{recipe}"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """Decision of the rules for one module.

    Attributes:
        fqn: Fully qualified name of the module.
        include: Whether the module is included.
        recipe: Recipe of the rule; None selects the caller's.
        rule: Rule that decided; None if no rule matched.
    """

    fqn: str
    include: bool
    recipe: Recipe | None = None
    rule: Rule | None = None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Rules:
    """Ordered module rules; the last matching rule wins.

    Attributes:
        rules: Rules in order.
    """

    rules: tuple[Rule, ...] = ()

    def __post_init__(self) -> None:
        """Raise if two rules with the same pattern decide differently.

        The first of them would have no effect.
        """
        seen: dict[str, Rule] = {}
        for rule in self.rules:
            other = seen.setdefault(rule.pattern, rule)
            if other.setting != rule.setting:
                raise Fp8Error(f"Module rules {str(other)!r} and {str(rule)!r} contradict each other. Remove one.")

    @classmethod
    def parse(cls, rules: "Rules | Iterable[str | Rule]") -> "Rules":
        """Parse rules, given as strings or `Rule` objects.

        Raises:
            Fp8Error: If a rule is invalid, or two rules contradict each other.
        """
        if isinstance(rules, Rules):
            return rules
        if isinstance(rules, str):
            raise Fp8Error(f"Module rules must be a list of strings, got the string {rules!r}. Put it in a list.")
        return cls(rules=tuple(rule if isinstance(rule, Rule) else Rule.parse(rule) for rule in rules))

    def match(self, fqn: str) -> Decision:
        """Return the decision for one module by its fully qualified name."""
        for rule in reversed(self.rules):  # later rules win
            if rule.matches(fqn):
                return Decision(fqn=fqn, include=rule.include, recipe=rule.recipe, rule=rule)
        # Exclusions only mean "all but these". With an inclusion, only matching modules are included.
        return Decision(fqn=fqn, include=not any(rule.include for rule in self.rules))

    def apply(self, names: Iterable[str]) -> list[Decision]:
        """Return the decisions for modules, in the order of `names`.

        Warns:
            UserWarning: If a rule matches none of the names.

        Raises:
            Fp8Error: If a rule has no effect, because later rules decide differently for all modules that it matches.
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
        # A rule that never wins is an error only if the winners decide differently; otherwise it is redundant.
        winners = {str(decision.rule): decision.rule for decision in matched if decision.rule is not None}
        if all(winner.setting != rule.setting for winner in winners.values()):
            raise Fp8Error(
                f"Module rule {str(rule)!r} has no effect: later rules ({', '.join(map(repr, winners))}) override it "
                f"for all {len(matched)} modules that it matches. The last matching rule wins: put the general rule "
                "first, or remove one of them."
            )


def select_modules(
    modules: Mapping[str, Any], keep: "Callable[[Any, str], bool] | Rules | Iterable[str | Rule] | None"
) -> dict[str, Decision]:
    """Return the decision of a filter or of rules for each module.

    Args:
        modules: Modules that can be converted, by fully qualified name.
        keep: Function (module, name) that returns False for modules to exclude, or rules. None includes all modules.

    Returns:
        Decisions by name, in the order of `modules`.

    Warns:
        UserWarning: If a rule matches no name.

    Raises:
        Fp8Error: If a rule is invalid or has no effect.
    """
    if keep is None or callable(keep):
        included = {name: keep is None or bool(keep(module, name)) for name, module in modules.items()}
        return {name: Decision(fqn=name, include=include) for name, include in included.items()}
    return {decision.fqn: decision for decision in Rules.parse(keep).apply(modules)}


@lru_cache(maxsize=1024)
def _compiled(pattern: str) -> re.Pattern[str]:
    if not pattern.startswith("re:"):
        # `fnmatch.translate`, because `fnmatch.fnmatch` changes case and slashes on Windows.
        return re.compile(fnmatch.translate(pattern))
    try:
        return re.compile(pattern[3:])
    except re.error as error:
        raise Fp8Error(f"Module rule {pattern!r} is not a regular expression: {error}.") from error
