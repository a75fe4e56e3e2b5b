"""`ScalePolicy`: how an amax becomes a scale, as data. The canonical rule; `fp8_common.presets` has those of peers.

A policy only describes; `fp8_common.amax_to_scale` computes. Frameworks share these objects.
"""

import dataclasses
import math
from typing import Literal

from fp8_common._errors import Fp8Error
from fp8_common._records import Record

FLOAT32_MAX = (2.0 - 2.0**-23) * 2.0**127
# Within these limits a scale and its reciprocal are both normal, so hardware that flushes subnormals agrees.
SCALE_MIN = 2.0**-126
SCALE_MAX = 2.0**100
# Within it max * 2^-margin is exact in float32, for every format.
MAX_MARGIN = 16

MxMode = Literal["floor", "ceil", "even", "rceil"]
MX_MODES: tuple[MxMode, ...] = ("floor", "ceil", "even", "rceil")
HistoryAlgo = Literal["max", "most_recent"]
HISTORY_ALGOS: tuple[HistoryAlgo, ...] = ("max", "most_recent")


# Weak references let a compiler see a policy go: else it takes the next one at its address for it.
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, weakref_slot=True)
class ScalePolicy(Record):
    """How an amax becomes a scale.

    Attributes:
        name: Name shown in errors and reports.
        margin: The scale aims at `fmt.max * 2^-margin`; an integer from -16 to 16.
        power_of_2: Round the scale down to a power of two, exactly, by clearing its mantissa.
        eps: An amax below this counts as this; 0 switches it off.
        zero: What an amax of zero gives: the previous scale, 1.0, or `fmt.max / eps` ("eps").
        nonfinite: What an infinite or NaN amax gives: the previous scale, 1.0, or the bare quotient ("propagate").
        upper: Largest scale.
        lower: Smallest scale.
        formula: "divide" is `max * 2^-margin / amax`; "divide_then_margin" rounds and may overflow before the margin;
            "descale" divides amax by max first and stores that (DeepGEMM); "e8m0" makes a power of two per MX block.
        mx_mode: Rounding mode of "e8m0".
        history: Length of the amax history of delayed scaling; 0 is current scaling.
        algo: How delayed scaling reduces its history.
    """

    name: str = "canonical"
    margin: int = 0
    power_of_2: bool = False
    eps: float = 0.0
    zero: Literal["previous", "one", "eps"] = "previous"
    nonfinite: Literal["previous", "one", "propagate"] = "previous"
    upper: float = SCALE_MAX
    lower: float = SCALE_MIN
    formula: Literal["divide", "divide_then_margin", "descale", "e8m0"] = "divide"
    mx_mode: MxMode = "rceil"
    history: int = 0
    algo: HistoryAlgo = "max"

    def __post_init__(self) -> None:
        """Refuse values that no implementation could honour."""
        self.check_choices()
        # `type(...) is int`, since isinstance would accept True.
        if type(self.margin) is not int or abs(self.margin) > MAX_MARGIN:
            raise Fp8Error(f"margin must be an integer from -{MAX_MARGIN} to {MAX_MARGIN}, got {self.margin!r}.")
        # A subnormal eps would be zero on hardware that flushes subnormals.
        if not (self.eps == 0 or (SCALE_MIN <= self.eps < math.inf)):
            raise Fp8Error(f"eps must be 0 or a normal positive float32 (>= 2^-126), got {self.eps!r}.")
        if self.zero == "eps" and self.eps == 0:
            raise Fp8Error('zero="eps" needs eps > 0; got eps=0. Set eps, or use zero="previous".')
        if not 0 < self.lower < self.upper:
            raise Fp8Error(f"lower must be positive and below upper, got lower={self.lower!r}, upper={self.upper!r}.")
        if type(self.history) is not int or self.history < 0:
            raise Fp8Error(f"history must be 0 (current scaling) or a length, got {self.history!r}.")


CANONICAL = ScalePolicy()
"""The rule of this project: IEEE division, the previous scale where amax is zero, infinite or NaN, scales in
[2^-126, 2^100]."""

POWER_OF_2 = ScalePolicy(name="power_of_2", power_of_2=True)
"""The canonical rule with power-of-two scales."""
