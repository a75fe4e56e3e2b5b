"""`choose_layers`: which layers of a model get FP8 products, by rules or by a function."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from fp8_common import Decision, Fp8Error, Rule, Rules

RulesOrFilter = Rules | Iterable[str | Rule] | Callable[[Any, str], bool]


def choose_layers(layers: Mapping[str, Any], rules: RulesOrFilter) -> list[Decision]:
    """Return the decisions about the layers that are converted.

    Args:
        layers: By their dotted names.
        rules: As `fp8_common.Rules` describes, or a function `(layer, name) -> bool`.

    Raises:
        Fp8Error: None is converted, or a rule decides nothing.
    """
    if callable(rules):
        decisions = [Decision(fqn=name, include=bool(rules(layer, name))) for name, layer in layers.items()]
    else:
        decisions = Rules.parse(rules).apply(layers)
    chosen = [decision for decision in decisions if decision.include]
    if not chosen:
        raise Fp8Error(
            f"No layer to convert among {len(layers)} ({', '.join(list(layers)[:3]) or 'none found'}). "
            "Check the rules and the model."
        )
    return chosen
