"""Scales from amax, E8M0 scales and amax histories.

All results are exact, although XLA flushes subnormals.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from fp8_common._reference.scaling import (
    INF_KEY,
    MANTISSA_MASK,
    MIN_NORMAL_KEY,
    check_history,
    check_mode,
    stable_zero_key,
)
from fp8_common.formats import E8M0, Format, get_data_format
from fp8_common.jax._rounding import decode
from fp8_common.jax.numerics import (
    HIDDEN_BIT,
    NAN_KEY,
    SIGN_MASK,
    as_float32,
    broadcast_scale,
    divide,
    divide_nearest,
    float_key,
    from_bits,
    to_bits,
    to_uint8_codes,
)
from fp8_common.policy import CANONICAL, SCALE_MAX, SCALE_MIN, HistoryAlgo, MxMode, ScalePolicy


def amax_to_scale(
    amax: ArrayLike, fmt: str | Format, policy: ScalePolicy = CANONICAL, prev: ArrayLike | None = None
) -> jax.Array:
    """Return the scale into a format; see `fp8_common.amax_to_scale`.

    The gradient is zero.

    Args:
        amax: float16, bfloat16 or float32 of any shape, max |x|. The sign is ignored.
        fmt: Format of the scaled values; static under jit.
        policy: Rule for the scale; static under jit.
        prev: Current scale, float32, broadcastable to `amax`. Depending on the policy, it is kept if amax is zero,
            infinite or NaN. None means 1.0.

    Returns:
        float32 of the shape of `amax`.

    Raises:
        Fp8Error: If the format is unknown, the dtype is not supported, or `prev` does not broadcast.
    """
    value = as_float32(amax, "amax")
    fallback = broadcast_scale(np.float32(1) if prev is None else prev, value.shape, "prev")
    return _amax_to_scale(value, fallback, fmt=get_data_format(fmt), policy=policy)


def amax_to_scale_inv(
    amax: ArrayLike, fmt: str | Format, policy: ScalePolicy = CANONICAL, prev: ArrayLike | None = None
) -> jax.Array:
    """Return the scale back from a format, the reciprocal of `amax_to_scale`.

    Arguments and errors are those of `amax_to_scale`; `prev` is a scale into FP8 here, too.
    """
    return reciprocal(amax_to_scale(amax, fmt, policy, prev))


def reciprocal(scale: ArrayLike) -> jax.Array:
    """Return RN32(1 / scale) by IEEE division, including subnormals.

    The gradient is zero.

    Args:
        scale: float16, bfloat16 or float32, any shape.

    Returns:
        float32 of the shape of `scale`.

    Raises:
        Fp8Error: If the dtype is not supported.
    """
    return _reciprocal(as_float32(scale, "scale"))


@partial(jax.jit, static_argnames=("fmt", "policy"), inline=True)
def _amax_to_scale(amax: jax.Array, prev: jax.Array, *, fmt: Format, policy: ScalePolicy) -> jax.Array:
    key, prev = float_key(lax.stop_gradient(amax)), lax.stop_gradient(prev)
    if policy.stable:
        key = _rounded_key(key, fmt, stable_zero_key(fmt))
    if policy.formula == "e8m0":
        return e8m0_to_scale(amax_to_e8m0(from_bits(key), fmt, policy.mx_mode))
    # The usual policies need fewer operations: with them, subnormal amax and quotients give the limits.
    if _stays_normal(policy):
        return _replace_unusable(_normal_scale(key, fmt, policy), key, policy, prev)
    quotient = divide(fmt.max * 2.0**-policy.margin, _at_least_eps(key, policy))
    return _replace_unusable(_limit(quotient, policy), key, policy, prev)


@partial(jax.jit, inline=True)
def _reciprocal(scale: jax.Array) -> jax.Array:
    bits = to_bits(lax.stop_gradient(scale))
    key = float_key(scale)
    # Reciprocals of huge scales are subnormal. XLA's division flushes them, so they are computed by integers.
    # 253 << 23 are the bits of 2^126, whose reciprocal is the smallest normal number, for which division is exact.
    is_huge = (key > jnp.int32(253 << 23)) & (key < INF_KEY)
    magnitude = jnp.where(is_huge, _subnormal_reciprocal_bits(key), to_bits(divide(1.0, from_bits(key))))
    return from_bits(magnitude | (bits & jnp.int32(SIGN_MASK)))


def _subnormal_reciprocal_bits(key: jax.Array) -> jax.Array:
    """Return the bits of RN32(1 / scale) for scales above 2^126.

    The bits are the integer nearest to 2^149 / scale. With scale = significand * 2^(field - 150), this is
    2^(299 - field) / significand. The error of the truncated float quotient is less than 1.5. The remainder, modulo
    2^32 (where the numerator is 0), gives the direction of the correction. There are no ties.
    """
    significand = (key & jnp.int32(MANTISSA_MASK)) | jnp.int32(HIDDEN_BIT)
    # 2^(299 - field), for the two exponent fields above 2^126: 253 and 254.
    numerator = jnp.where(key >> 23 == 254, jnp.float32(2.0**45), jnp.float32(2.0**46))
    estimate = divide_nearest(numerator, significand.astype(jnp.float32)).astype(jnp.int32)
    twice_left = -2 * estimate * significand
    above, below = twice_left > significand, twice_left < -significand
    return estimate + above.astype(jnp.int32) - below.astype(jnp.int32)


def _stays_normal(policy: ScalePolicy) -> bool:
    """Return whether a policy gives normal scales and reciprocals only."""
    limited = policy.lower >= SCALE_MIN and policy.upper <= SCALE_MAX
    return limited and policy.formula == "divide" and not policy.eps


def _normal_scale(key: jax.Array, fmt: Format, policy: ScalePolicy) -> jax.Array:
    """Return limited scales from amax bits.

    A subnormal amax counts as 2^-126, which also gives the upper limit.
    """
    amax = from_bits(lax.max(key, np.int32(MIN_NORMAL_KEY)))
    return _limit(divide_nearest(fmt.max * 2.0**-policy.margin, amax), policy)


def _at_least_eps(key: jax.Array, policy: ScalePolicy) -> jax.Array:
    """Return max(amax, eps) from amax bits; NaN remains NaN."""
    eps = int(np.float32(policy.eps).view(np.int32))
    return from_bits(jnp.maximum(key, jnp.int32(eps)))


def _limit(scale: jax.Array, policy: ScalePolicy) -> jax.Array:
    scale = lax.clamp(np.float32(policy.lower), scale, np.float32(policy.upper))
    return from_bits(lax.bitwise_and(to_bits(scale), np.int32(INF_KEY))) if policy.power_of_2 else scale


def _replace_unusable(scale: jax.Array, key: jax.Array, policy: ScalePolicy, prev: jax.Array) -> jax.Array:
    """Replace the scales of an amax that is zero, infinite or NaN."""

    # Selected without arithmetic, which would flush a subnormal `prev` to zero.
    def replaced(flags: jax.Array, by: str) -> jax.Array:
        other = jnp.broadcast_to(prev, scale.shape) if by == "previous" else lax.full_like(scale, 1)
        return lax.select(flags, other, scale)

    is_zero, is_nonfinite = lax.eq(key, np.int32(0)), lax.ge(key, np.int32(INF_KEY))
    if policy.zero == policy.nonfinite:
        return replaced(lax.bitwise_or(is_zero, is_nonfinite), policy.zero)
    if policy.zero != "eps":
        scale = replaced(is_zero, policy.zero)
    return replaced(is_nonfinite, policy.nonfinite)


def amax_to_e8m0(amax: ArrayLike, fmt: str | Format, mode: MxMode = "rceil") -> jax.Array:
    """Return E8M0 codes, the biased exponents of scales back from FP8.

    The gradient is zero.

    Args:
        amax: float16, bfloat16 or float32 of any shape, max |x| of each block.
        fmt: Format of the elements; static under jit.
        mode: Rounding mode: "floor", "ceil", "even", "rceil" or "stable", as in `fp8_common.numerics.amax_to_e8m0`;
            static under jit.

    Returns:
        uint8 codes of the shape of `amax`; 255 (NaN) where amax is infinite or NaN.

    Raises:
        Fp8Error: If the mode or format is unknown, or the dtype is not supported.
    """
    fmt = get_data_format(fmt)
    check_mode(mode)
    key = float_key(lax.stop_gradient(as_float32(amax, "amax")))
    # Codes below 0, for amax that are subnormal or too small, become 0, the smallest scale.
    if mode in ("rceil", "stable"):
        code = _rceil(_rounded_key(key, fmt) if mode == "stable" else key, fmt)
    else:
        code = _round_exponent(key, fmt, mode) - fmt.max_exponent
    return jnp.where(key >= INF_KEY, E8M0.nan_code, jnp.maximum(code, 0)).astype(jnp.uint8)


def e8m0_to_scale(codes: ArrayLike) -> jax.Array:
    """Return float32 scales into FP8 for E8M0 codes.

    Args:
        codes: uint8 or float8_e8m0fnu, any shape.

    Returns:
        float32 of the shape of `codes`: 2^(127 - code), which is subnormal for code 254, and NaN for 255.
    """
    code = lax.stop_gradient(to_uint8_codes(codes, E8M0)).astype(jnp.int32)
    # The exponent field of 2^(127 - code) is 254 - code. 1 << 22 are the bits of 2^-127, which is subnormal.
    bits = jnp.where(code == 254, jnp.int32(1 << 22), (254 - code) << 23)
    return from_bits(jnp.where(code == E8M0.nan_code, jnp.int32(NAN_KEY), bits))


def e8m0_to_scale_inv(codes: ArrayLike) -> jax.Array:
    """Return float32 scales back from FP8 for E8M0 codes.

    Args:
        codes: uint8 or float8_e8m0fnu, any shape.

    Returns:
        float32 of the shape of `codes`: 2^(code - 127), which is subnormal for code 0, and NaN for 255.
    """
    return decode(codes, E8M0)


def _rounded_key(key: jax.Array, fmt: Format, zero: int = 0) -> jax.Array:
    """Round float32 keys to the mantissa of a format.

    See `fp8_common._reference.scaling.rounded_key`.
    """
    dropped = 23 - fmt.mantissa_bits
    finite = jnp.minimum(key, INF_KEY - 1)
    up = ((1 << (dropped - 1)) - 1) + ((finite >> dropped) & 1)
    rounded = jnp.minimum((finite + up) >> dropped << dropped, INF_KEY - 1)
    return jnp.where(key >= INF_KEY, key, jnp.where(key <= zero, 0, rounded))


def _round_exponent(key: jax.Array, fmt: Format, mode: MxMode) -> jax.Array:
    if mode == "even":
        # The sum may overflow for NaN only, whose code is selected by the unrounded key.
        key = key + jnp.int32(1 << (22 - fmt.mantissa_bits))
    if mode == "ceil":
        return (key >> 23) + ((key & MANTISSA_MASK) != 0).astype(jnp.int32)
    return key >> 23


def _rceil(key: jax.Array, fmt: Format) -> jax.Array:
    """Return E8M0 codes of the mode "rceil", by comparing mantissas."""
    limit = int(np.float32(fmt.max).view(np.int32))
    above = ((key & MANTISSA_MASK) > (limit & MANTISSA_MASK)).astype(jnp.int32)
    return (key >> 23) - ((limit >> 23) - 127) + above


def update_history(history: ArrayLike, amax: ArrayLike, algo: HistoryAlgo = "max") -> tuple[jax.Array, jax.Array]:
    """Record one observation per tensor, and reduce the histories.

    An infinite or NaN amax is not recorded, and the history of that tensor does not change. The gradient is zero.

    Args:
        history: float32 [L, ...]; slot 0 is the newest.
        amax: float32 [...], amax of this step.
        algo: Reduction: "max" over the history, or "most_recent" (slot 0); static under jit.

    Returns:
        New history [L, ...] and amax for the next scale [...], both float32.

    Raises:
        Fp8Error: If the shapes do not match, the history is empty, `algo` is unknown, or a dtype is not supported.
    """
    old = lax.stop_gradient(as_float32(history, "history"))
    key = float_key(lax.stop_gradient(as_float32(amax, "amax")))
    check_history(old.shape, key.shape, algo)
    # `from_bits(key)` is |amax|.
    rolled = jnp.concatenate([from_bits(key)[None], jnp.roll(old, -1, axis=0)[1:]])
    updated = jnp.where(key >= INF_KEY, old, rolled)
    return updated, reduce_history(updated, algo)


def reduce_history(history: jax.Array, algo: HistoryAlgo) -> jax.Array:
    """Return the reduced amax [...] of a float32 history [L, ...]."""
    return from_bits(jnp.max(float_key(history), axis=0)) if algo == "max" else history[0]
