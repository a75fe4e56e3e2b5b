"""`WeightLayout`: how a module keeps the weights that it multiplies by, and its forward."""

import dataclasses
from collections.abc import Callable
from typing import Any


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class WeightLayout:
    """Where a module keeps its weights, and how it computes.

    Attributes:
        forward: Called with the converted module and the inputs of its forward; returns what that returns.
        weights: The names of the parameters, [..., out_features, in_features].
        transposed: They are [..., in_features, out_features] instead.
        stacked: They are stacks, [experts, ...].
    """

    forward: Callable[..., Any]
    weights: tuple[str, ...]
    transposed: bool = False
    stacked: bool = False
