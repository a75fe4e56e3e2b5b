"""The scale that multiplies a tensor into FP8, from its amax; the definition that all frameworks equal."""

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fp8_common._amax import INF_KEY, KEY_MASK, as_float32, float_key
from fp8_common._e8m0 import amax_to_e8m0, e8m0_to_scale
from fp8_common._formats import Format, get_data_format
from fp8_common._policy import CANONICAL, ScalePolicy

EXPONENT_MASK = 0x7F800000
"""Exponent field of float32 bits."""


def amax_to_scale(
    amax: ArrayLike, fmt: str | Format, policy: ScalePolicy = CANONICAL, prev: ArrayLike | None = None
) -> NDArray[np.float32]:
    """Return the scale that multiplies values into `fmt`.

    Canonically RN32(fmt.max * 2^-margin / amax), IEEE division, clamped to [2^-126, 2^100]. The cap makes every
    float32-subnormal input round to zero, so that implementations which flush subnormals agree; it also keeps the
    reciprocal normal.

    Args:
        amax: float32 of any shape, max |x| (its sign is ignored).
        fmt: The format the values go to.
        policy: The rule; see `fp8_common._policy`.
        prev: float32, broadcastable to `amax`: the scale in use, kept where amax is zero, infinite or NaN (as the
            policy says). None stands for 1.0: current scaling.

    Returns:
        float32 of the shape of `amax`.

    Raises:
        Fp8Error: Unknown format, or `amax` is not float16, bfloat16 or float32.
    """
    fmt = get_data_format(fmt)
    value = np.abs(as_float32(amax, "amax"))
    if policy.formula == "e8m0":
        return e8m0_to_scale(amax_to_e8m0(value, fmt, policy.mx_mode))
    if policy.formula == "descale":
        return reciprocal(amax_to_scale_inv(value, fmt, policy))
    key = float_key(value)
    with np.errstate(all="ignore"):  # amax of zero, infinity and NaN divide too; their scales are replaced below
        scale = _limit(_quotient(_at_least_eps(value, policy), fmt, policy), policy)
    # Current scaling has no previous scale; 1.0 leaves the data as it is.
    fallback = np.ones((), np.float32) if prev is None else as_float32(prev, "prev")
    return _replace_unusable(scale, key, policy, fallback)


def amax_to_scale_inv(
    amax: ArrayLike, fmt: str | Format, policy: ScalePolicy = CANONICAL, prev: ArrayLike | None = None
) -> NDArray[np.float32]:
    """Return the scale that multiplies FP8 values back.

    This is RN32(1 / `amax_to_scale`), except for DeepGEMM's rule, which computes it from amax directly.
    Arguments, shapes and errors are those of `amax_to_scale`; `prev` is a scale into FP8 here too.
    """
    fmt = get_data_format(fmt)
    if policy.formula != "descale":
        return reciprocal(amax_to_scale(amax, fmt, policy, prev))
    with np.errstate(all="ignore"):
        descale = _at_least_eps(np.abs(as_float32(amax, "amax")), policy) / np.float32(fmt.max)
    return _power_of_2_above(descale) if policy.power_of_2 else descale


def reciprocal(scale: ArrayLike) -> NDArray[np.float32]:
    """Return RN32(1 / scale), IEEE division; float32 of the shape of `scale`."""
    with np.errstate(all="ignore"):
        return np.float32(1) / as_float32(scale, "scale")


def _at_least_eps(amax: NDArray[np.float32], policy: ScalePolicy) -> NDArray[np.float32]:
    """Raise small amax to eps; NaN is not less than eps and stays."""
    eps = np.float32(policy.eps)
    return np.where(amax < eps, eps, amax)


def _quotient(amax: NDArray[np.float32], fmt: Format, policy: ScalePolicy) -> NDArray[np.float32]:
    if policy.formula == "divide_then_margin":
        # The quotient may overflow before the margin brings it back, which flax and MS-AMP do too.
        return np.float32(fmt.max) / amax * np.float32(2.0**-policy.margin)
    # The margin goes into the numerator, which stays exact; the quotient may be at an end of the range already.
    return np.float32(fmt.max * 2.0**-policy.margin) / amax


def _limit(scale: NDArray[np.float32], policy: ScalePolicy) -> NDArray[np.float32]:
    scale = np.clip(scale, np.float32(policy.lower), np.float32(policy.upper))
    if policy.power_of_2:
        # Clearing the mantissa is an exact floor; exp2(floor(log2(scale))) would round up just below powers of two.
        scale = (scale.view(np.int32) & np.int32(EXPONENT_MASK)).view(np.float32)
    return scale


def _replace_unusable(
    scale: NDArray[np.float32], key: NDArray[np.int32], policy: ScalePolicy, prev: NDArray[np.float32]
) -> NDArray[np.float32]:
    """Put the scale that the policy prescribes where amax is zero, infinite or NaN."""
    # By the bits of amax, not by the scale: after the limits, the scales of zero and infinity are ordinary numbers.
    replacement = {"previous": prev, "one": np.float32(1)}
    if policy.zero != "eps":
        scale = np.where(key == 0, replacement[policy.zero], scale)
    if policy.nonfinite == "propagate":
        scale = np.where(key == INF_KEY, np.float32(0), np.where(key > INF_KEY, np.float32(np.nan), scale))
    else:
        scale = np.where(key >= INF_KEY, replacement[policy.nonfinite], scale)
    return scale.astype(np.float32)


def _power_of_2_above(x: NDArray[np.float32]) -> NDArray[np.float32]:
    """Round up to a power of two in [2^-126, 2^127], exactly; infinity and NaN stay."""
    bits = x.view(np.int32) & np.int32(KEY_MASK)
    # Field 0 would be subnormal, field 255 infinity.
    exponent = np.clip((bits >> 23) + ((bits & 0x7FFFFF) != 0), 1, 254)
    return np.where(np.isfinite(x), (exponent << 23).astype(np.int32).view(np.float32), x)
