"""From values to scales: amax, scales, E8M0, and amax history.

The definition that all frameworks equal. An amax is an integer maximum over float bits with the sign cleared: for
non-negative floats the order of the bits is the order of the values, infinity sorts above every number and NaN above
infinity. So the maximum needs no rounding, does not depend on the order of reduction, survives hardware that flushes
subnormals, and cannot lose a NaN.

E8M0 scales are integer operations on the bits of the amax alone. Source: OCP Microscaling Formats (MX) Specification
1.0 for "floor"; the other modes are torchao's and NVIDIA's cuBLAS recipe ("rceil").

A history holds exactly L observations for each tensor. At the end of a step it rolls by -1, slot 0 takes the new amax,
and it is reduced: the result gives the scale of the next step. Slot 0 is the newest, slot 1 the oldest and the last
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
"""Clears the sign of float32 bits."""
INF_KEY = 0x7F800000
"""Key of infinity, and the exponent field of float32 bits; larger keys are NaN."""
MIN_NORMAL_KEY = 0x00800000
"""Key of 2^-126, the smallest normal float32; smaller keys are subnormal or zero."""

INPUT_DTYPES = tuple(np.dtype(t) for t in (np.float16, ml_dtypes.bfloat16, np.float32))
"""The dtypes that can be quantized; all convert to float32 exactly."""


def as_float32(x: ArrayLike, what: str = "x") -> NDArray[np.float32]:
    """Return `x` as float32, exactly.

    Raises:
        Fp8Error: `x` is not float16, bfloat16 or float32.
    """
    array = np.asarray(x)
    if array.dtype not in INPUT_DTYPES:
        raise Fp8Error(f"{what} must be float16, bfloat16 or float32, got {array.dtype}. Convert it to float32 first.")
    with np.errstate(invalid="ignore"):  # a signalling NaN is no error
        # Widening only: no input dtype has a value that float32 lacks, so nothing is rounded here.
        return array.astype(np.float32)


def amax(x: ArrayLike, axis: int | Sequence[int] | None = None, keepdims: bool = False) -> NDArray[np.float32]:
    """Return max |x| over `axis` as float32, exactly.

    Args:
        x: Array of float16, bfloat16 or float32.
        axis: Axis or axes to reduce; None reduces all.
        keepdims: Keep reduced axes with length 1.

    Returns:
        float32; 0 for an empty reduction, NaN if any reduced element is NaN, else inf if any is infinite.

    Raises:
        Fp8Error: `x` has another dtype.
    """
    axes = tuple(axis) if isinstance(axis, Sequence) else axis
    # np.max of floats keeps a NaN too; the GPU kernels and all-reduces compare keys.
    keys = float_key(as_float32(x))
    # Keys are never negative, so `initial` changes nothing but the result of an empty reduction.
    return key_to_float(np.asarray(np.max(keys, axis=axes, keepdims=keepdims, initial=0)))


def float_key(x: NDArray[np.float32]) -> NDArray[np.int32]:
    """Return float32 bits without sign, an order-preserving int32 key."""
    return x.view(np.int32) & np.int32(KEY_MASK)


def key_to_float(key: NDArray[np.int32]) -> NDArray[np.float32]:
    """Return the float32 whose bits are `key`."""
    return np.asarray(key, np.int32).view(np.float32)


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
        policy: The rule; see `fp8_common.policy`.
        prev: float32, broadcastable to `amax`: the scale in use, kept where amax is zero, infinite or NaN (depending on
            the policy). None stands for 1.0: current scaling.

    Returns:
        float32 of the shape of `amax`.

    Raises:
        Fp8Error: Unknown format, or `amax` is not float16, bfloat16 or float32.
    """
    fmt = get_data_format(fmt)
    value = np.abs(as_float32(amax, "amax"))
    if policy.stable:
        value = key_to_float(rounded_key(float_key(value), fmt, stable_zero_key(fmt)))
    if policy.formula == "e8m0":
        return e8m0_to_scale(amax_to_e8m0(value, fmt, policy.mx_mode))
    key = float_key(value)
    with np.errstate(all="ignore"):  # amax of zero, infinity and NaN divide too; their scales are replaced below
        # The margin goes into the numerator, which stays exact; the quotient may be at an end of the range already.
        scale = _limit(np.float32(fmt.max * 2.0**-policy.margin) / _at_least_eps(value, policy), policy)
    # Current scaling has no previous scale; 1.0 leaves the data unchanged.
    fallback = np.broadcast_to(np.float32(1) if prev is None else as_float32(prev, "prev"), scale.shape)
    return _replace_unusable(scale, key, policy, fallback)


def amax_to_scale_inv(
    amax: ArrayLike, fmt: str | Format, policy: ScalePolicy = CANONICAL, prev: ArrayLike | None = None
) -> NDArray[np.float32]:
    """Return the scale that multiplies FP8 values back.

    This is RN32(1 / `amax_to_scale`).

    Args:
        amax: float32 of any shape, max |x| (its sign is ignored).
        fmt: The format that the values have.
        policy: The rule; see `fp8_common.policy`.
        prev: float32, broadcastable to `amax`: the scale in use, into FP8 as in `amax_to_scale`.

    Returns:
        float32 of the shape of `amax`.

    Raises:
        Fp8Error: Unknown format, or `amax` is not float16, bfloat16 or float32.
    """
    return reciprocal(amax_to_scale(amax, fmt, policy, prev))


def reciprocal(scale: ArrayLike) -> NDArray[np.float32]:
    """Return RN32(1 / scale), IEEE division; float32 of the shape of `scale`.

    Raises:
        Fp8Error: `scale` is not float16, bfloat16 or float32.
    """
    with np.errstate(all="ignore"):
        return np.float32(1) / as_float32(scale, "scale")


def _at_least_eps(amax: NDArray[np.float32], policy: ScalePolicy) -> NDArray[np.float32]:
    """Raise small amax to eps; NaN stays."""
    eps = np.float32(policy.eps)
    return np.where(amax < eps, eps, amax)


def _limit(scale: NDArray[np.float32], policy: ScalePolicy) -> NDArray[np.float32]:
    scale = np.clip(scale, np.float32(policy.lower), np.float32(policy.upper))
    if policy.power_of_2:
        # Clearing the mantissa is an exact floor; exp2(floor(log2(scale))) would round up just below powers of two.
        scale = (scale.view(np.int32) & np.int32(INF_KEY)).view(np.float32)
    return scale


def _replace_unusable(
    scale: NDArray[np.float32], key: NDArray[np.int32], policy: ScalePolicy, prev: NDArray[np.float32]
) -> NDArray[np.float32]:
    """Replace scales of zero, infinite and NaN amax by the policy's."""
    # By the bits of amax, not by the scale: after the limits, the scales of zero and infinity are ordinary numbers.
    replacement = {"previous": prev, "one": np.float32(1)}
    if policy.zero != "eps":
        scale = np.where(key == 0, replacement[policy.zero], scale)
    return np.where(key >= INF_KEY, replacement[policy.nonfinite], scale).astype(np.float32)


MANTISSA = 0x007FFFFF
"""Mantissa field of float32 bits."""


def amax_to_e8m0(amax: ArrayLike, fmt: str | Format, mode: MxMode = "rceil") -> NDArray[np.uint8]:
    """Return E8M0 codes: the biased exponents of scales back from FP8.

    Args:
        amax: float32, any shape: max |x| of each block.
        fmt: The element format of the block.
        mode: "floor": exponent of amax, minus the format's own (values may saturate). "ceil": the same, rounded up.
            "even": amax first rounded to the format's mantissa. "rceil": the smallest power of two that is at least
            amax / fmt.max, so that nothing saturates. "stable": "rceil" of the amax of the decoded values, so that
            casting decoded values gives the same codes and scale.

    Returns:
        uint8 codes of the shape of `amax`; 255 (NaN) where amax is infinite or NaN.

    Raises:
        Fp8Error: Unknown mode or format, or `amax` is not float16, bfloat16 or float32.
    """
    fmt = get_data_format(fmt)
    check_mode(mode)
    # 64 bits: "even" adds to the key, which may be a NaN's already.
    key = float_key(as_float32(amax, "amax")).astype(np.int64)
    # float32 and E8M0 share the bias 127, so an exponent field of float32 is a code.
    if mode in ("rceil", "stable"):
        code = _rceil(rounded_key(key, fmt) if mode == "stable" else key, fmt)
    else:
        code = _round_exponent(key, fmt, mode) - fmt.max_exponent
    # Small amax, zero included, take code 0: the specification has no scale below 2^-127, and no zero.
    return np.where(key >= INF_KEY, E8M0.nan_code, np.maximum(code, 0)).astype(np.uint8)


def check_mode(mode: str) -> None:
    """Raise for unknown rounding modes.

    Raises:
        Fp8Error: `mode` is none of `MX_MODES`.
    """
    if mode not in MX_MODES:
        raise Fp8Error(f"mode must be one of {', '.join(MX_MODES)}, got {mode!r}.")


def e8m0_to_scale(codes: ArrayLike) -> NDArray[np.float32]:
    """Return the float32 scale into FP8 of E8M0 codes.

    2^(127-code) for uint8 codes, in their shape; NaN for 255.

    Raises:
        Fp8Error: `codes` is neither uint8 nor float8_e8m0fnu.
    """
    with np.errstate(all="ignore"):
        # Exact: 1/2^k is a power of two, and 2^-127 (code 254) is a float32 subnormal.
        return np.float32(1) / decode(codes, E8M0)


def e8m0_to_scale_inv(codes: ArrayLike) -> NDArray[np.float32]:
    """Return the float32 scale back from FP8 of E8M0 codes.

    2^(code-127) for uint8 codes, in their shape; NaN for 255.

    That of code 0 is subnormal.

    Raises:
        Fp8Error: `codes` is neither uint8 nor float8_e8m0fnu.
    """
    return decode(codes, E8M0)


def rounded_key(key: NDArray[Any], fmt: Format, zero: int = 0) -> NDArray[Any]:
    """Round keys to the mantissa of `fmt`, ties to even.

    The amax after a cast there and back by a power of two.

    Keys up to `zero` become 0. Keys that would round to infinity become the largest finite key; infinity and NaN do not
    change.
    """
    dropped = 23 - fmt.mantissa_bits
    finite = np.minimum(key, INF_KEY - 1)
    up = ((1 << (dropped - 1)) - 1) + ((finite >> dropped) & 1)
    rounded = np.minimum((finite + up) >> dropped << dropped, INF_KEY - 1)
    return np.where(key >= INF_KEY, key, np.where(key <= zero, 0, rounded)).astype(key.dtype)


def stable_zero_key(fmt: Format) -> int:
    """Return the largest amax key rounded to zero by stable scales.

    Shared by all frameworks.
    """
    return (fmt.min_exponent - fmt.mantissa_bits - 1 - MAX_EXPONENT + 127) << 23


def _round_exponent(key: NDArray[np.int64], fmt: Format, mode: MxMode) -> NDArray[np.int64]:
    if mode == "even":
        # Half a step of the format's mantissa: where it carries, amax would round up to the next power of two.
        key = key + (1 << (22 - fmt.mantissa_bits))
    # Any mantissa bit puts amax above its power of two, which "ceil" rounds up.
    return (key >> 23) + ((key & MANTISSA) != 0 if mode == "ceil" else 0)


def _rceil(key: NDArray[np.int64], fmt: Format) -> NDArray[np.int64]:
    """Return E8M0 exponents by comparing mantissas.

    amax <= fmt.max * 2^k exactly when its mantissa is not the larger.
    """
    # A division would round, and give a power of two for a quotient just above it.
    limit = int(np.float32(fmt.max).view(np.int32))
    exponent = (key >> 23) - ((limit >> 23) - 127)
    # amax / max is above 2^(difference of the exponents) exactly if amax's mantissa is above max's.
    # A subnormal amax has no leading bit to compare, and needs less than the smallest scale anyway.
    return np.where(key >> 23 == 0, 0, exponent + ((key & MANTISSA) > (limit & MANTISSA)))


def update_history(
    history: ArrayLike, amax: ArrayLike, algo: HistoryAlgo = "max"
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Record an observation per tensor; return the reduced amax.

    An infinite or NaN amax is not recorded: the history of that tensor does not change.

    Args:
        history: float32 [L, ...]; slot 0 is the newest.
        amax: float32 [...], this step's amax.
        algo: "max" over the history, or "most_recent" (slot 0).

    Returns:
        (new history [L, ...], amax for the next scale [...]), both float32.

    Raises:
        Fp8Error: Shapes do not fit, the history is empty, or `algo` is unknown.
    """
    window, observed = as_float32(history, "history"), as_float32(amax, "amax")
    check_history(window.shape, observed.shape, algo)
    # The roll moves the oldest observation into slot 0, where the new one replaces it.
    rolled = np.roll(window, -1, axis=0)
    # Through the key: an observation of -0 or with a sign counts as its magnitude.
    rolled[0] = key_to_float(float_key(observed))
    # The whole history stays, unrolled: one step that overflowed must not push out a good observation.
    updated = np.where(float_key(observed) >= INF_KEY, window, rolled)
    return updated, reduce_history(updated, algo)


def reduce_history(history: NDArray[np.float32], algo: HistoryAlgo) -> NDArray[np.float32]:
    """Return the amax [...] of a history [L, ...]."""
    return key_to_float(np.max(float_key(history), axis=0)) if algo == "max" else history[0].copy()


def check_history(history: tuple[int, ...], amax: tuple[int, ...], algo: str) -> None:
    """Validate the shapes and names of `update_history`.

    Shared by all frameworks.

    Raises:
        Fp8Error: Shapes do not fit, the history is empty, or `algo` is unknown.
    """
    if algo not in HISTORY_ALGOS:
        raise Fp8Error(f"algo must be one of {', '.join(HISTORY_ALGOS)}, got {algo!r}.")
    if len(history) == 0 or history[0] == 0 or tuple(history[1:]) != tuple(amax):
        raise Fp8Error(
            f"history must have shape [L, ...] with L >= 1 and the shape of amax after it, "
            f"got history {tuple(history)} and amax {tuple(amax)}."
        )
