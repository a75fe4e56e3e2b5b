"""Decides which scale rules exist: the canonical one and, by name, those of the libraries users come from.

A policy only describes; `fp8_common.scaling.amax_to_scale` computes. Frameworks share these objects.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Literal

from fp8_common.errors import Fp8Error
from fp8_common.records import Record

FLOAT32_MAX = (2.0 - 2.0**-23) * 2.0**127
SCALE_MIN = 2.0**-126
SCALE_MAX = 2.0**100
MAX_MARGIN = 16

MxMode = Literal["floor", "ceil", "even", "rceil"]
MX_MODES: tuple[MxMode, ...] = ("floor", "ceil", "even", "rceil")
HistoryAlgo = Literal["max", "most_recent"]
HISTORY_ALGOS: tuple[HistoryAlgo, ...] = ("max", "most_recent")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
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
        if type(self.margin) is not int or abs(self.margin) > MAX_MARGIN:
            raise Fp8Error(f"margin must be an integer from -{MAX_MARGIN} to {MAX_MARGIN}, got {self.margin!r}.")
        if not (self.eps == 0 or (SCALE_MIN <= self.eps < math.inf)):
            raise Fp8Error(f"eps must be 0 or a normal positive float32 (>= 2^-126), got {self.eps!r}.")
        if self.zero == "eps" and self.eps == 0:
            raise Fp8Error('zero="eps" needs eps > 0; got eps=0. Set eps, or use zero="previous".')
        if not 0 < self.lower < self.upper:
            raise Fp8Error(f"lower must be positive and below upper, got lower={self.lower!r}, upper={self.upper!r}.")
        if type(self.history) is not int or self.history < 0:
            raise Fp8Error(f"history must be 0 (current scaling) or a length, got {self.history!r}.")


CANONICAL = ScalePolicy()
"""The rule of this project: IEEE division, previous scale where amax says nothing, scales in [2^-126, 2^100]."""

POWER_OF_2 = ScalePolicy(name="power_of_2", power_of_2=True)
"""The canonical rule with power-of-two scales."""


def te_delayed(margin: int = 0, history: int = 1024, algo: HistoryAlgo = "max") -> ScalePolicy:
    """TransformerEngine's delayed scaling: previous scale for zero, inf and NaN; overflow gives FLT_MAX."""
    return ScalePolicy(name="te_delayed", margin=margin, history=history, algo=algo, upper=FLOAT32_MAX)


def te_current(pow2: bool = False, eps: float = 0.0) -> ScalePolicy:
    """TransformerEngine's current scaling: 1.0 for zero, inf and NaN; eps is applied first; overflow gives FLT_MAX."""
    zero = "eps" if eps else "one"
    return ScalePolicy(name="te_current", power_of_2=pow2, eps=eps, zero=zero, nonfinite="one", upper=FLOAT32_MAX)


def torchao(power_of_2: bool = False) -> ScalePolicy:
    """torchao.float8's dynamic scaling: amax is at least 1e-12, inf gives scale 0 and NaN gives NaN.

    With `power_of_2` the mantissa is cleared exactly; torchao's exp2(floor(log2(s))) rounds up just below most
    powers of two, which this does not reproduce.
    """
    return ScalePolicy(
        name="torchao",
        power_of_2=power_of_2,
        eps=1e-12,
        zero="eps",
        nonfinite="propagate",
        upper=FLOAT32_MAX,
    )


def flax(margin: int = 0, history: int = 1024) -> ScalePolicy:
    """flax.linen.fp8_ops' delayed scaling: overflow gives inf, so that its stored 1/scale becomes 0."""
    return ScalePolicy(name="flax", margin=margin, history=history, upper=math.inf, formula="divide_then_margin")


def msamp(margin: int = 0) -> ScalePolicy:
    """MS-AMP: power-of-two scales without an upper limit; the power is the exact floor of the quotient."""
    return ScalePolicy(name="msamp", margin=margin, power_of_2=True, upper=math.inf, formula="divide_then_margin")


def deepgemm(ue8m0: bool = False) -> ScalePolicy:
    """DeepGEMM: dequantization scale max(amax, 1e-4) / max, with `ue8m0` rounded up to a power of two."""
    return ScalePolicy(
        name="deepgemm",
        power_of_2=ue8m0,
        eps=1e-4,
        zero="eps",
        nonfinite="propagate",
        upper=math.inf,
        formula="descale",
    )


def mx(mode: MxMode = "rceil") -> ScalePolicy:
    """OCP MX block scales: the E8M0 scale of `fp8_common.e8m0.amax_to_e8m0` as a multiplier."""
    return ScalePolicy(name="mx", power_of_2=True, formula="e8m0", mx_mode=mode)


PRESETS: Mapping[str, Callable[..., ScalePolicy]] = {
    "te_delayed": te_delayed,
    "te_current": te_current,
    "torchao": torchao,
    "flax": flax,
    "msamp": msamp,
    "deepgemm": deepgemm,
    "mx": mx,
}
"""Every peer's rule by name; the values are functions of its options."""
