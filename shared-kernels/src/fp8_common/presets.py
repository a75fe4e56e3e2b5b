"""Scale policies of TransformerEngine and OCP MX, with their options."""

from collections.abc import Callable, Mapping

from fp8_common.policy import FLOAT32_MAX, HistoryAlgo, MxMode, ScalePolicy


def te_delayed(margin: int = 0, history: int = 1024, algo: HistoryAlgo = "max") -> ScalePolicy:
    """TransformerEngine's delayed scaling.

    Previous scale for zero, inf and NaN; overflow gives FLT_MAX.

    Args:
        margin: The scale aims at `max * 2^-margin`.
        history: Steps in the window.
        algo: "max" over the window, or "most_recent".
    """
    return ScalePolicy(name="te_delayed", margin=margin, history=history, algo=algo, upper=FLOAT32_MAX)


def te_current(pow2: bool = False, eps: float = 0.0) -> ScalePolicy:
    """TransformerEngine's current scaling.

    1.0 for zero, inf and NaN; eps is applied first; overflow gives FLT_MAX.
    """
    zero = "eps" if eps else "one"
    return ScalePolicy(name="te_current", power_of_2=pow2, eps=eps, zero=zero, nonfinite="one", upper=FLOAT32_MAX)


def mx(mode: MxMode = "rceil") -> ScalePolicy:
    """OCP MX block scales: the E8M0 scale of `fp8_common.numerics.amax_to_e8m0` as a multiplier."""
    return ScalePolicy(name="mx", power_of_2=True, formula="e8m0", mx_mode=mode)


PRESETS: Mapping[str, Callable[..., ScalePolicy]] = {preset.__name__: preset for preset in (te_delayed, te_current, mx)}
"""Each policy's function by name."""
