"""`TensorStatistics` of an FP8 tensor, and `judge` for their limits.

The limits compare the error of clamping, or of flushing to zero, with the error of rounding to E4M3, for normally
distributed values. The level is "look" if the mean squared error of both is equal, and "act" if clamping or flushing
adds ten times as much. For underflow, "act" begins where half of the values are lost: flat tails of activation
functions produce many tiny values, whose loss has no effect.
"""

import dataclasses
import math
from typing import Literal

Level = Literal["ok", "look", "act"]
LEVELS: tuple[Level, ...] = ("ok", "look", "act")
"""Levels, from harmless to urgent."""

SATURATED = 0.0044, 0.03
"""Shares of clamped values from which a tensor is "look" and "act"."""
UNDERFLOWED = 0.037, 0.5
"""The same limits for the share of non-zero values that became zero."""
OVER_RANGE = 1.7, 2.3
"""The same limits for `TensorStatistics.over_range`, if saturated values were not counted; for 10^6 values."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TensorStatistics:
    """Statistics of one FP8 tensor in one step.

    A number is None if the framework does not record it.

    Attributes:
        amax: Largest absolute value; NaN or infinity if the tensor had one.
        scale: Scale into FP8; the smallest one if there are several.
        saturated: Share of values that were clamped to the largest FP8 value.
        underflowed: Share of non-zero values that became zero.
        nonfinite: Share of infinities and NaN.
        over_range: amax divided by the largest magnitude that the scale can represent.
        notice: Reason for the level "look", or "".
        fault: Reason for the level "act", or "".
    """

    amax: float | None = None
    scale: float | None = None
    saturated: float | None = None
    underflowed: float | None = None
    nonfinite: float | None = None
    over_range: float | None = None
    notice: str = ""
    fault: str = ""


def judge(tensor: TensorStatistics) -> tuple[Level, str]:
    """Return the level of a tensor and the reason, "" for "ok"."""
    if tensor.fault:
        return "act", tensor.fault
    if tensor.nonfinite:
        return "act", f"{percent(tensor.nonfinite)} not finite"
    if tensor.amax is not None and not math.isfinite(tensor.amax):
        return "act", f"amax is {tensor.amax}"
    saturated, underflowed, over_range = tensor.saturated, tensor.underflowed, tensor.over_range
    findings: list[tuple[Level, str]] = [("look", tensor.notice) if tensor.notice else ("ok", "")]
    if saturated is not None:
        findings.append((_level(saturated, SATURATED), f"saturated {percent(saturated)}"))
    elif over_range is not None:
        findings.append((_level(over_range, OVER_RANGE), f"amax {over_range:.1f} times the range of its scale"))
    if underflowed is not None:
        findings.append((_level(underflowed, UNDERFLOWED), f"underflowed {percent(underflowed)}"))
    return max(findings, key=lambda finding: LEVELS.index(finding[0]))  # the first one with the highest level


def _level(value: float, limits: tuple[float, float]) -> Level:
    return LEVELS[sum(value >= limit for limit in limits)]


def percent(share: float) -> str:
    """Return a share as text in per cent, with two significant digits."""
    return f"{float(f'{100 * share:.2g}'):g} %"
