"""Scale policies of TransformerEngine and OCP MX."""

from collections.abc import Callable, Mapping

from fp8_common.policy import FLOAT32_MAX, HistoryAlgo, MxMode, ScalePolicy


def te_delayed(margin: int = 0, history: int = 1024, algo: HistoryAlgo = "max") -> ScalePolicy:
    """Return the policy of TransformerEngine's delayed scaling.

    An amax of zero, infinity or NaN keeps the previous scale. A scale that overflows becomes the largest float32.

    Args:
        margin: Headroom in powers of two: the scale maps amax to `fmt.max * 2^-margin`.
        history: Length of the window in steps.
        algo: "max" over the window, or "most_recent".
    """
    return ScalePolicy(name="te_delayed", margin=margin, history=history, algo=algo, upper=FLOAT32_MAX)


def te_current(pow2: bool = False, eps: float = 0.0) -> ScalePolicy:
    """Return the policy of TransformerEngine's current scaling.

    An amax of infinity or NaN gives the scale 1.0, and so does zero if `eps` is 0. A scale that overflows becomes the
    largest float32.

    Args:
        pow2: Whether to round scales down to powers of two.
        eps: Lower bound on amax; 0 disables it.
    """
    zero = "eps" if eps else "one"
    return ScalePolicy(name="te_current", power_of_2=pow2, eps=eps, zero=zero, nonfinite="one", upper=FLOAT32_MAX)


def mx(mode: MxMode = "rceil") -> ScalePolicy:
    """Return the policy of OCP MX block scales.

    Args:
        mode: Rounding mode of the E8M0 scale; see `fp8_common.numerics.amax_to_e8m0`.
    """
    return ScalePolicy(name="mx", power_of_2=True, formula="e8m0", mx_mode=mode)


PRESETS: Mapping[str, Callable[..., ScalePolicy]] = {preset.__name__: preset for preset in (te_delayed, te_current, mx)}
"""Functions that return a policy, by name."""
