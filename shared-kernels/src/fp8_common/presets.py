"""The scale rules of other libraries, limits and odd cases included, as functions of the options that each has.

TransformerEngine, torchao, flax, MS-AMP, DeepGEMM and OCP MX; each returns a `ScalePolicy`, and `PRESETS` names them.
"""

import math
from collections.abc import Callable, Mapping

from fp8_common.policy import FLOAT32_MAX, HistoryAlgo, MxMode, ScalePolicy


def te_delayed(margin: int = 0, history: int = 1024, algo: HistoryAlgo = "max") -> ScalePolicy:
    """TransformerEngine's delayed scaling: previous scale for zero, inf and NaN; overflow gives FLT_MAX.

    Args:
        margin: The scale aims at `max * 2^-margin`.
        history: Steps in the window.
        algo: "max" over the window, or "most_recent".
    """
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
    """OCP MX block scales: the E8M0 scale of `fp8_common.amax_to_e8m0` as a multiplier."""
    return ScalePolicy(name="mx", power_of_2=True, formula="e8m0", mx_mode=mode)


PRESETS: Mapping[str, Callable[..., ScalePolicy]] = {
    preset.__name__: preset for preset in (te_delayed, te_current, torchao, flax, msamp, deepgemm, mx)
}
"""Every peer's rule by name; the values are functions of its options."""
