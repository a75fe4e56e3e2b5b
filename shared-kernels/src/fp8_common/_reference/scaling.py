"""Amax, scales, E8M0 scales and amax histories: the definition for all frameworks.

An amax is an integer maximum over float bits with a cleared sign. For non-negative floats, the bits have the order of
the values, with infinity above all numbers and NaN above infinity. So the maximum is not rounded, does not depend on
the order of reduction, is the same on hardware that flushes subnormals, and preserves NaN.

E8M0 scales are integer operations on the bits of the amax. Sources: OCP Microscaling Formats (MX) Specification 1.0 for
"floor", NVIDIA's cuBLAS recipe for "rceil", and torchao for "ceil" and "even".

A history has exactly L observations of each tensor. At the end of a step it is rolled by -1, slot 0 is set to the new
amax, and the reduced history gives the scale for the next step. Slot 0 is the newest, slot 1 the oldest and the last
slot the second newest, because TransformerEngine and flax roll in this direction.
"""

from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import ArrayLike, NDArray

from fp8_common._reference.rounding import decode
from fp8_common.errors import Fp8Error
from fp8_common.formats import E8M0, Format, get_data_format
from fp8_common.policy import CANONICAL, HISTORY_ALGOS, MAX_EXPONENT, MX_MODES, HistoryAlgo, MxMode, ScalePolicy

KEY_MASK = 0x7FFFFFFF
"""Mask of float32 bits without the sign."""
INF_KEY = 0x7F800000
"""Key of infinity, and the exponent field of float32 bits; larger keys are NaN."""
MANTISSA_MASK = 0x007FFFFF
"""Mask of the mantissa in float32 bits."""
MIN_NORMAL_KEY = 0x00800000
"""Key of 2^-126, the smallest normal float32; smaller keys are subnormal or zero."""

INPUT_DTYPES = tuple(np.dtype(t) for t in (np.float16, ml_dtypes.bfloat16, np.float32))
"""dtypes that can be quantized; all convert to float32 exactly."""


def as_float32(x: ArrayLike, what: str = "x") -> NDArray[np.float32]:
    """Convert an array to float32, exactly.

    Args:
        x: float16, bfloat16 or float32, any shape.
        what: Name of the argument in errors.

    Raises:
        Fp8Error: If `x` is not float16, bfloat16 or float32.
    """
    array = np.asarray(x)
    if array.dtype not in INPUT_DTYPES:
        raise Fp8Error(f"{what} must be float16, bfloat16 or float32, got {array.dtype}. Convert it to float32 first.")
    with np.errstate(invalid="ignore"):  # a signalling NaN is no error
        # float32 represents all values of the input dtypes, so nothing is rounded.
        return array.astype(np.float32)


def amax(x: ArrayLike, axis: int | Sequence[int] | None = None, keepdims: bool = False) -> NDArray[np.float32]:
    """Return max |x| over axes as float32, exactly.

    Args:
        x: float16, bfloat16 or float32, any shape.
        axis: Axis or axes to reduce; None reduces all.
        keepdims: Whether to keep reduced axes with length 1.

    Returns:
        float32; 0 for an empty reduction, NaN if any reduced element is NaN, else infinity if any is infinite.

    Raises:
        Fp8Error: If the dtype of `x` is not supported.
    """
    axes = tuple(axis) if isinstance(axis, Sequence) else axis
    # np.max of floats also preserves NaN, but GPU kernels and all-reduces compare keys.
    keys = float_key(as_float32(x))
    # Keys are never negative, so `initial` only affects an empty reduction.
    return key_to_float(np.asarray(np.max(keys, axis=axes, keepdims=keepdims, initial=0)))


def float_key(x: NDArray[np.float32]) -> NDArray[np.int32]:
    """Return the bits of |x|, an order-preserving int32 key."""
    return x.view(np.int32) & np.int32(KEY_MASK)


def key_to_float(key: NDArray[np.int32]) -> NDArray[np.float32]:
    """Return the float32 values with the bits `key`."""
    return np.asarray(key, np.int32).view(np.float32)


def amax_to_scale(
    amax: ArrayLike, fmt: str | Format, policy: ScalePolicy = CANONICAL, prev: ArrayLike | None = None
) -> NDArray[np.float32]:
    """Return the scale that multiplies values into a format.

    The canonical policy computes RN32(fmt.max * 2^-margin / amax) by IEEE division and clamps it to [2^-126, 2^100].
    With this upper limit, subnormal float32 inputs round to zero, so that implementations that flush subnormals agree,
    and the reciprocal is normal.

    Args:
        amax: max |x|, float16, bfloat16 or float32 of any shape. The sign is ignored.
        fmt: Format of the scaled values.
        policy: Rule for the scale; see `fp8_common.policy`.
        prev: Current scale, float32, broadcastable to `amax`. Depending on the policy, it is kept if amax is zero,
            infinite or NaN. None means 1.0, for current scaling.

    Returns:
        float32 of the shape of `amax`.

    Raises:
        Fp8Error: If the format is unknown, or `amax` is not float16, bfloat16 or float32.
    """
    fmt = get_data_format(fmt)
    value = np.abs(as_float32(amax, "amax"))
    if policy.stable:
        value = key_to_float(rounded_key(float_key(value), fmt, stable_zero_key(fmt)))
    if policy.formula == "e8m0":
        return e8m0_to_scale(amax_to_e8m0(value, fmt, policy.mx_mode))
    key = float_key(value)
    with np.errstate(all="ignore"):  # amax of zero, infinity and NaN divide too; their scales are replaced below
        # The margin is part of the numerator, which remains exact; the quotient may be at an end of the range already.
        scale = _limit(np.float32(fmt.max * 2.0**-policy.margin) / _at_least_eps(value, policy), policy)
    # Current scaling has no previous scale. 1.0 does not change the data.
    fallback = np.broadcast_to(np.float32(1) if prev is None else as_float32(prev, "prev"), scale.shape)
    return _replace_unusable(scale, key, policy, fallback)


def amax_to_scale_inv(
    amax: ArrayLike, fmt: str | Format, policy: ScalePolicy = CANONICAL, prev: ArrayLike | None = None
) -> NDArray[np.float32]:
    """Return the scale that multiplies values back from FP8.

    This is the reciprocal of `amax_to_scale` in float32.

    Args:
        amax: max |x|, float16, bfloat16 or float32 of any shape. The sign is ignored.
        fmt: Format of the scaled values.
        policy: Rule for the scale; see `fp8_common.policy`.
        prev: Current scale into FP8, float32, broadcastable to `amax`, as in `amax_to_scale`.

    Returns:
        float32 of the shape of `amax`.

    Raises:
        Fp8Error: If the format is unknown, or `amax` is not float16, bfloat16 or float32.
    """
    return reciprocal(amax_to_scale(amax, fmt, policy, prev))


def reciprocal(scale: ArrayLike) -> NDArray[np.float32]:
    """Return RN32(1 / scale) by IEEE division, float32 shaped like `scale`.

    Raises:
        Fp8Error: If `scale` is not float16, bfloat16 or float32.
    """
    with np.errstate(all="ignore"):
        return np.float32(1) / as_float32(scale, "scale")


def _at_least_eps(amax: NDArray[np.float32], policy: ScalePolicy) -> NDArray[np.float32]:
    """Return max(amax, eps); NaN remains NaN."""
    eps = np.float32(policy.eps)
    return np.where(amax < eps, eps, amax)


def _limit(scale: NDArray[np.float32], policy: ScalePolicy) -> NDArray[np.float32]:
    scale = np.clip(scale, np.float32(policy.lower), np.float32(policy.upper))
    if policy.power_of_2:
        # Clearing the mantissa is an exact floor. exp2(floor(log2(scale))) rounds up just below powers of two.
        scale = (scale.view(np.int32) & np.int32(INF_KEY)).view(np.float32)
    return scale


def _replace_unusable(
    scale: NDArray[np.float32], key: NDArray[np.int32], policy: ScalePolicy, prev: NDArray[np.float32]
) -> NDArray[np.float32]:
    """Replace the scales of an amax that is zero, infinite or NaN."""
    # Selected by the bits of amax: after the limits, the scales of zero and infinity are ordinary numbers.
    replacement = {"previous": prev, "one": np.float32(1)}
    if policy.zero != "eps":
        scale = np.where(key == 0, replacement[policy.zero], scale)
    return np.where(key >= INF_KEY, replacement[policy.nonfinite], scale).astype(np.float32)


MANTISSA = 0x007FFFFF
"""Mantissa field of float32 bits."""


def amax_to_e8m0(amax: ArrayLike, fmt: str | Format, mode: MxMode = "rceil") -> NDArray[np.uint8]:
    """Return E8M0 codes, the biased exponents of scales back from FP8.

    Args:
        amax: max |x| of each block, float16, bfloat16 or float32 of any shape.
        fmt: Format of the elements.
        mode: Rounding mode. "floor": exponent of amax minus `fmt.max_exponent`; values may saturate. "ceil": the same,
            with amax rounded up to a power of two. "even": the same, with amax rounded to the format's mantissa.
            "rceil": smallest power of two that is at least amax / fmt.max, so that no value saturates. "stable":
            "rceil" for the amax of the decoded values, so that a cast of decoded values gives the same codes and scale.

    Returns:
        uint8 codes of the shape of `amax`; 255 (NaN) where amax is infinite or NaN.

    Raises:
        Fp8Error: If the mode or format is unknown, or `amax` is not float16, bfloat16 or float32.
    """
    fmt = get_data_format(fmt)
    check_mode(mode)
    # 64 bits, because "even" adds to the key, which overflows int32 for NaN.
    key = float_key(as_float32(amax, "amax")).astype(np.int64)
    # float32 and E8M0 have the same bias of 127, so the exponent field of a float32 is a code.
    if mode in ("rceil", "stable"):
        code = _rceil(rounded_key(key, fmt) if mode == "stable" else key, fmt)
    else:
        code = _round_exponent(key, fmt, mode) - fmt.max_exponent
    # A small amax, or zero, gives code 0: E8M0 has neither zero nor a scale below 2^-127.
    return np.where(key >= INF_KEY, E8M0.nan_code, np.maximum(code, 0)).astype(np.uint8)


def check_mode(mode: str) -> None:
    """Raise for an unknown rounding mode of MX scales.

    Raises:
        Fp8Error: If `mode` is not in `MX_MODES`.
    """
    if mode not in MX_MODES:
        raise Fp8Error(f"mode must be one of {', '.join(MX_MODES)}, got {mode!r}.")


def e8m0_to_scale(codes: ArrayLike) -> NDArray[np.float32]:
    """Return the scales into FP8 for E8M0 codes.

    Args:
        codes: uint8 or float8_e8m0fnu, any shape.

    Returns:
        float32 of the shape of `codes`: 2^(127 - code), and NaN for 255.

    Raises:
        Fp8Error: If `codes` is neither uint8 nor float8_e8m0fnu.
    """
    with np.errstate(all="ignore"):
        # Exact: 1/2^k is a power of two, and 2^-127 (code 254) is a float32 subnormal.
        return np.float32(1) / decode(codes, E8M0)


def e8m0_to_scale_inv(codes: ArrayLike) -> NDArray[np.float32]:
    """Return the scales back from FP8 for E8M0 codes.

    Args:
        codes: uint8 or float8_e8m0fnu, any shape.

    Returns:
        float32 of the shape of `codes`: 2^(code - 127), which is subnormal for code 0, and NaN for 255.

    Raises:
        Fp8Error: If `codes` is neither uint8 nor float8_e8m0fnu.
    """
    return decode(codes, E8M0)


def rounded_key(key: NDArray[Any], fmt: Format, zero: int = 0) -> NDArray[Any]:
    """Round float32 keys to the mantissa of a format, ties to even.

    The result is the amax after a cast to FP8 and back with a power-of-two scale. Keys up to `zero` become 0. A key
    that would round to infinity becomes the largest finite key; infinity and NaN do not change.
    """
    dropped = 23 - fmt.mantissa_bits
    finite = np.minimum(key, INF_KEY - 1)
    up = ((1 << (dropped - 1)) - 1) + ((finite >> dropped) & 1)
    rounded = np.minimum((finite + up) >> dropped << dropped, INF_KEY - 1)
    return np.where(key >= INF_KEY, key, np.where(key <= zero, 0, rounded)).astype(key.dtype)


def stable_zero_key(fmt: Format) -> int:
    """Return the largest amax key that a stable scale rounds to zero."""
    return (fmt.min_exponent - fmt.mantissa_bits - 1 - MAX_EXPONENT + 127) << 23


def _round_exponent(key: NDArray[np.int64], fmt: Format, mode: MxMode) -> NDArray[np.int64]:
    if mode == "even":
        # Add half a step of the format's mantissa: it carries if amax would round up to the next power of two.
        key = key + (1 << (22 - fmt.mantissa_bits))
    # With any mantissa bit, amax is above its power of two, and "ceil" rounds it up.
    return (key >> 23) + ((key & MANTISSA) != 0 if mode == "ceil" else 0)


def _rceil(key: NDArray[np.int64], fmt: Format) -> NDArray[np.int64]:
    """Return E8M0 codes of the mode "rceil", by comparing mantissas."""
    # A division is rounded, and gives a power of two for a quotient just above it.
    limit = int(np.float32(fmt.max).view(np.int32))
    exponent = (key >> 23) - ((limit >> 23) - 127)
    # amax / max exceeds 2^(difference of the exponents) if and only if the mantissa of amax exceeds that of max.
    # A subnormal amax has no leading bit to compare, and needs less than the smallest scale.
    return np.where(key >> 23 == 0, 0, exponent + ((key & MANTISSA) > (limit & MANTISSA)))


def update_history(
    history: ArrayLike, amax: ArrayLike, algo: HistoryAlgo = "max"
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Record one observation per tensor, and reduce the histories.

    An infinite or NaN amax is not recorded, and the history of that tensor does not change.

    Args:
        history: float32 [L, ...]; slot 0 is the newest.
        amax: float32 [...], amax of this step.
        algo: Reduction: "max" over the history, or "most_recent" (slot 0).

    Returns:
        New history [L, ...] and amax for the next scale [...], both float32.

    Raises:
        Fp8Error: If the shapes do not match, the history is empty, or `algo` is unknown.
    """
    window, observed = as_float32(history, "history"), as_float32(amax, "amax")
    check_history(window.shape, observed.shape, algo)
    # The roll moves the oldest observation into slot 0, where the new one replaces it.
    rolled = np.roll(window, -1, axis=0)
    # By the key, so that -0 and negative observations count as their magnitude.
    rolled[0] = key_to_float(float_key(observed))
    # The history is not rolled either, so that a step that overflowed does not remove a valid observation.
    updated = np.where(float_key(observed) >= INF_KEY, window, rolled)
    return updated, reduce_history(updated, algo)


def reduce_history(history: NDArray[np.float32], algo: HistoryAlgo) -> NDArray[np.float32]:
    """Return the reduced amax [...] of a history [L, ...]."""
    return key_to_float(np.max(float_key(history), axis=0)) if algo == "max" else history[0].copy()


def check_history(history: tuple[int, ...], amax: tuple[int, ...], algo: str) -> None:
    """Validate the arguments of `update_history`, given as shapes.

    Raises:
        Fp8Error: If the shapes do not match, the history is empty, or `algo` is unknown.
    """
    if algo not in HISTORY_ALGOS:
        raise Fp8Error(f"algo must be one of {', '.join(HISTORY_ALGOS)}, got {algo!r}.")
    if len(history) == 0 or history[0] == 0 or tuple(history[1:]) != tuple(amax):
        raise Fp8Error(
            f"history must have shape [L, ...] with L >= 1 and the shape of amax after it, "
            f"got history {tuple(history)} and amax {tuple(amax)}."
        )
