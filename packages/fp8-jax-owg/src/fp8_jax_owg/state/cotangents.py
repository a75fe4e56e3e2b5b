"""Observed amax and scales as float32 cotangents: an encoding that tells them apart from the zeros of autodiff.

Autodiff makes zeros wherever a parameter was not used: for a branch that was not taken, for a layer that was
skipped. An observed amax of zero must differ from that, and must survive `+ 0`. So

| cotangent | means |
|---|---|
| 0.0 | autodiff's zero: not used, nothing observed |
| -inf | not observed, said explicitly |
| NaN, +inf | not finite, hence not recorded |
| in (-2^-125, -2^-126] | an observed zero or subnormal: its bits plus those of 2^-126, with the sign set |
| anything else | itself |

The fourth row also keeps subnormals out of the float operations in which XLA flushes them. Values are scales and
amax, hence not negative. Everything here works on bits.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fp8_common.jax.arrays import float_key, from_bits, to_bits

NOT_OBSERVED = np.float32(-np.inf)
NOT_OBSERVED_BITS = int(NOT_OBSERVED.view(np.int32))
SIGN_BIT = -(2**31)
INFINITY_KEY = 0x7F800000
SMALLEST_NORMAL_KEY = 0x00800000


# Primitives from here on, where `jnp` would trace a function for each operator: each product of a program traces these.
def encode(value: jax.Array) -> jax.Array:
    """Return observations as cotangents.

    Args:
        value: float32, any shape: not negative, or -inf for "not observed".
    """
    bits = to_bits(value)
    # what is negative is large without a sign
    is_small = lax.lt(lax.bitcast_convert_type(bits, np.uint32), np.uint32(SMALLEST_NORMAL_KEY))
    # Exponent field 1 instead of 0 with the mantissa as it was: a normal number, which nothing flushes. Below zero,
    # where no scale and no amax lies, so that `decode` knows it.
    raise_by = lax.mul(lax.convert_element_type(is_small, np.int32), np.int32(SIGN_BIT + SMALLEST_NORMAL_KEY))
    return from_bits(lax.add(bits, raise_by))


def decode(cotangent: jax.Array) -> jax.Array:
    """Return cotangents as observations: float32, finite, or -inf for "not observed"."""
    bits, key = to_bits(cotangent), float_key(cotangent)
    # Negative, in the lowest binade: `encode` put zeros and subnormals there, and nothing else is negative but -inf.
    lowest = lax.bitwise_and(lax.ge(key, np.int32(SMALLEST_NORMAL_KEY)), lax.lt(key, np.int32(2 * SMALLEST_NORMAL_KEY)))
    is_small = lax.bitwise_and(lax.lt(bits, np.int32(0)), lowest)
    observed = lax.select(is_small, from_bits(lax.sub(key, np.int32(SMALLEST_NORMAL_KEY))), cotangent)
    # `key` has no sign: -0, -inf and every NaN are among these, too.
    nothing = lax.bitwise_or(lax.eq(key, np.int32(0)), lax.ge(key, np.int32(INFINITY_KEY)))
    return observed_where(lax.bitwise_not(nothing), observed)


def observed_where(flags: jax.Array, value: jax.Array) -> jax.Array:
    """Return `value` where the flags of its shape are true, else `NOT_OBSERVED`."""
    # as integers, among which `jax_debug_infs` stops at no constant
    bits = to_bits(value)
    return from_bits(lax.select(flags, bits, lax.full_like(bits, NOT_OBSERVED_BITS)))


def is_observed(value: jax.Array) -> jax.Array:
    """Return, for decoded observations, where there is one; bool."""
    return lax.ne(to_bits(value), np.int32(NOT_OBSERVED_BITS))


def maximum(x: jax.Array, y: jax.Array) -> jax.Array:
    """Return the greater observation, subnormals included, which XLA's float maximum takes for zero."""
    return from_ordered(lax.max(to_ordered(x), to_ordered(y)))


def meet(x: jax.Array, y: jax.Array) -> jax.Array:
    """Return the maximum of two cotangents, element by element; 0 where neither has observed anything."""
    return zero_where_nothing(encode(maximum(decode(x), decode(y))))


def zero_where_nothing(cotangent: jax.Array) -> jax.Array:
    """Return cotangents that say "not observed" by 0 alone: norms of them stay finite."""
    return jnp.where(is_observed(decode(cotangent)), cotangent, jnp.float32(0))


def maximum_over(x: jax.Array, axis: int) -> jax.Array:
    """Return the greatest observation along an axis, which must not be empty."""
    return from_ordered(jnp.max(to_ordered(x), axis=axis))


def to_ordered(x: jax.Array) -> jax.Array:
    """Return int32 that sort as the float32 `x` do; what collectives take the maximum of."""
    return _flipped(to_bits(x))


def from_ordered(keys: jax.Array) -> jax.Array:
    """Undo `to_ordered`."""
    return from_bits(_flipped(keys))


def _flipped(bits: jax.Array) -> jax.Array:
    # of negative floats the greater has the smaller bits
    return lax.select(lax.lt(bits, np.int32(0)), lax.bitwise_xor(bits, np.int32(0x7FFFFFFF)), bits)
