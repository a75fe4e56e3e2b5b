"""Scales from amax by the rules of `fp8_common._scaling`, exact although XLA flushes subnormals."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from fp8_common._amax import INF_KEY, MIN_NORMAL_KEY
from fp8_common._formats import Format, get_data_format
from fp8_common._policy import CANONICAL, SCALE_MAX, SCALE_MIN, ScalePolicy
from fp8_common.jax._arrays import (
    EXPONENT_MASK,
    HIDDEN_BIT,
    MANTISSA_MASK,
    NAN_KEY,
    SIGN_MASK,
    as_float32,
    broadcast_scale,
    float_key,
    from_bits,
    to_bits,
)
from fp8_common.jax._division import divide, divide_nearest
from fp8_common.jax._e8m0 import amax_to_e8m0, e8m0_to_scale


def amax_to_scale(
    amax: ArrayLike, fmt: str | Format, policy: ScalePolicy = CANONICAL, prev: ArrayLike | None = None
) -> jax.Array:
    """Return the scale that multiplies values into `fmt`, as `fp8_common.amax_to_scale` defines it.

    The gradient is zero.

    Args:
        amax: float16, bfloat16 or float32, any shape: max |x| (its sign is ignored).
        fmt: The format the values go to; static under jit.
        policy: The rule; static under jit.
        prev: float32, broadcastable to `amax`: the scale in use, kept where the policy says so; None is 1.0.

    Returns:
        float32 of the shape of `amax`.

    Raises:
        Fp8Error: Unknown format, unsupported dtype, or `prev` does not broadcast.
    """
    value = as_float32(amax, "amax")
    fallback = broadcast_scale(np.float32(1) if prev is None else prev, value.shape, "prev")
    return _amax_to_scale(value, fallback, fmt=get_data_format(fmt), policy=policy)


def amax_to_scale_inv(
    amax: ArrayLike, fmt: str | Format, policy: ScalePolicy = CANONICAL, prev: ArrayLike | None = None
) -> jax.Array:
    """Return the scale that multiplies FP8 values back.

    This is RN32(1 / `amax_to_scale`), except for DeepGEMM's rule, which computes it from amax directly.
    Arguments, shapes and errors are those of `amax_to_scale`; `prev` is a scale into FP8 here too.
    """
    if policy.formula != "descale":
        return reciprocal(amax_to_scale(amax, fmt, policy, prev))
    return _descale(as_float32(amax, "amax"), fmt=get_data_format(fmt), policy=policy)


def reciprocal(scale: ArrayLike) -> jax.Array:
    """Return RN32(1 / scale), IEEE division, subnormal scales and results included.

    The gradient is zero.

    Args:
        scale: float16, bfloat16 or float32, any shape.

    Returns:
        float32 of the shape of `scale`.

    Raises:
        Fp8Error: Unsupported dtype.
    """
    return _reciprocal(as_float32(scale, "scale"))


@partial(jax.jit, static_argnames=("fmt", "policy"), inline=True)
def _amax_to_scale(amax: jax.Array, prev: jax.Array, *, fmt: Format, policy: ScalePolicy) -> jax.Array:
    return key_to_scale(float_key(lax.stop_gradient(amax)), lax.stop_gradient(prev), fmt, policy)


def key_to_scale(key: jax.Array, prev: jax.Array, fmt: str | Format, policy: ScalePolicy) -> jax.Array:
    """Return `amax_to_scale` of amax that are given by their bits.

    Args:
        key: int32, any shape, not negative.
        prev: float32, broadcastable to `key`.
        fmt: The format the values go to; static under jit.
        policy: The rule; static under jit.
    """
    fmt = get_data_format(fmt)
    if policy.formula == "e8m0":
        return e8m0_to_scale(amax_to_e8m0(from_bits(key), fmt, policy.mx_mode))
    if policy.formula == "descale":
        return _reciprocal(_descale(from_bits(key), fmt=fmt, policy=policy))
    # The usual policies take a shorter way: what can be subnormal in it, amax and quotient, comes out at the limits
    # anyhow.
    if _stays_normal(policy):
        return _replace_unusable(_normal_scale(key, fmt, policy), key, policy, prev)
    return _replace_unusable(_limit(_quotient(_at_least_eps(key, policy), fmt, policy), policy), key, policy, prev)


@partial(jax.jit, static_argnames=("fmt", "policy"), inline=True)
def _descale(amax: jax.Array, *, fmt: Format, policy: ScalePolicy) -> jax.Array:
    value = _at_least_eps(float_key(lax.stop_gradient(amax)), policy)
    descale = divide_nearest(value, jnp.full_like(value, np.float32(fmt.max)))
    return _power_of_2_above(descale) if policy.power_of_2 else descale


@partial(jax.jit, inline=True)
def _reciprocal(scale: jax.Array) -> jax.Array:
    bits = to_bits(lax.stop_gradient(scale))
    key = float_key(scale)
    # Their reciprocals are subnormal: XLA's division flushes them, so they are made by integers.
    # 253 << 23 are the bits of 2^126, whose reciprocal is the smallest normal number and still exact by division.
    is_huge = (key > jnp.int32(253 << 23)) & (key < INF_KEY)
    magnitude = jnp.where(is_huge, _subnormal_reciprocal_bits(key), to_bits(divide(1.0, from_bits(key))))
    return from_bits(magnitude | (bits & jnp.int32(SIGN_MASK)))


def _subnormal_reciprocal_bits(key: jax.Array) -> jax.Array:
    """Return the bits of RN32(1 / scale) for 2^126 < scale < inf: the integer nearest 2^149 / scale.

    With scale = significand * 2^(field-150) that is 2^(299-field) / significand. The truncated float quotient
    is off by less than one and a half; the remainder, computed modulo 2^32 (where the numerator is 0), tells
    which way. No ties exist.
    """
    significand = (key & jnp.int32(MANTISSA_MASK)) | jnp.int32(HIDDEN_BIT)
    # 2^(299-field) for the only two exponent fields above 2^126, 253 and 254.
    numerator = jnp.where(key >> 23 == 254, jnp.float32(2.0**45), jnp.float32(2.0**46))
    estimate = divide_nearest(numerator, significand.astype(jnp.float32)).astype(jnp.int32)
    twice_left = -2 * estimate * significand
    above, below = twice_left > significand, twice_left < -significand
    return estimate + above.astype(jnp.int32) - below.astype(jnp.int32)


def _stays_normal(policy: ScalePolicy) -> bool:
    """Whether the limits of a policy keep every scale, and its reciprocal, among the normal float32."""
    limited = policy.lower >= SCALE_MIN and policy.upper <= SCALE_MAX
    return limited and policy.formula == "divide" and not policy.eps and policy.nonfinite != "propagate"


def _normal_scale(key: jax.Array, fmt: Format, policy: ScalePolicy) -> jax.Array:
    """Return the limited quotient of amax given by its bits: a subnormal amax gives the upper limit, as 2^-126 does."""
    amax = from_bits(lax.max(key, np.int32(MIN_NORMAL_KEY)))
    return _limit(divide_nearest(fmt.max * 2.0**-policy.margin, amax), policy)


def _at_least_eps(key: jax.Array, policy: ScalePolicy) -> jax.Array:
    """Raise small amax to eps, on bits: NaN sorts above every eps and stays."""
    eps = int(np.float32(policy.eps).view(np.int32))
    return from_bits(jnp.maximum(key, jnp.int32(eps)))


def _quotient(amax: jax.Array, fmt: Format, policy: ScalePolicy) -> jax.Array:
    if policy.formula == "divide_then_margin":
        return divide(fmt.max, amax) * jnp.float32(2.0**-policy.margin)
    return divide(fmt.max * 2.0**-policy.margin, amax)


def _limit(scale: jax.Array, policy: ScalePolicy) -> jax.Array:
    scale = lax.clamp(np.float32(policy.lower), scale, np.float32(policy.upper))
    return from_bits(lax.bitwise_and(to_bits(scale), np.int32(EXPONENT_MASK))) if policy.power_of_2 else scale


def _replace_unusable(scale: jax.Array, key: jax.Array, policy: ScalePolicy, prev: jax.Array) -> jax.Array:
    """Put the policy's answer where amax is zero, infinite or NaN; bits of `prev` pass unchanged."""

    # Selected, never multiplied: a subnormal `prev` would come out as zero.
    def replaced(flags: jax.Array, by: str) -> jax.Array:
        other = jnp.broadcast_to(prev, scale.shape) if by == "previous" else lax.full_like(scale, 1)
        return lax.select(flags, other, scale)

    is_zero, is_nonfinite = lax.eq(key, np.int32(0)), lax.ge(key, np.int32(INF_KEY))
    if policy.zero == policy.nonfinite:
        return replaced(lax.bitwise_or(is_zero, is_nonfinite), policy.zero)
    if policy.zero != "eps":
        scale = replaced(is_zero, policy.zero)
    if policy.nonfinite == "propagate":
        finite = jnp.where(key == INF_KEY, 0, to_bits(scale))
        return from_bits(jnp.where(key > INF_KEY, jnp.int32(NAN_KEY), finite))
    return replaced(is_nonfinite, policy.nonfinite)


def _power_of_2_above(x: jax.Array) -> jax.Array:
    """Round up to a power of two in [2^-126, 2^127], exactly; infinity and NaN stay."""
    key = float_key(x)
    exponent = jnp.clip((key >> 23) + ((key & MANTISSA_MASK) != 0).astype(jnp.int32), 1, 254)
    return jnp.where(key < INF_KEY, from_bits(exponent << 23), x)
