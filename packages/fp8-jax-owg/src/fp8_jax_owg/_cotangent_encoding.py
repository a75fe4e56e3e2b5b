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

from fp8_common.jax.arrays import float_key
from fp8_jax_owg._bits import from_bits, to_bits

NOT_OBSERVED = np.float32(-np.inf)
NOT_OBSERVED_BITS = int(NOT_OBSERVED.view(np.int32))
SIGN_BIT = -(2**31)
INFINITY_KEY = 0x7F800000
SMALLEST_NORMAL_KEY = 0x00800000
UNSOUND_BITS = 0x7FFFFFFF
"""The greatest integer, the bits of a NaN that no operation makes."""
FEW = 32
"""XLA on CPUs compiles a loop of windows for reductions of more elements than these, which takes twice as long."""


# Primitives from here on, where `jnp` would trace a function for each operator: each product of a program traces these.
def encode(value: jax.Array) -> jax.Array:
    """Return observations as cotangents.

    Args:
        value: float32, any shape: not negative, or -inf for "not observed".
    """
    return from_bits(encode_bits(to_bits(value)))


def encode_bits(bits: jax.Array) -> jax.Array:
    """Return `encode` of bits, int32, as bits."""
    # what is negative is large without a sign
    is_small = lax.lt(lax.bitcast_convert_type(bits, np.uint32), np.uint32(SMALLEST_NORMAL_KEY))
    # Exponent field 1 instead of 0 with the mantissa as it was: a normal number, which nothing flushes. Below zero,
    # where no scale and no amax lies, so that `decode` knows it.
    raise_by = lax.mul(lax.convert_element_type(is_small, np.int32), np.int32(SIGN_BIT + SMALLEST_NORMAL_KEY))
    return lax.add(bits, raise_by)


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
    return from_bits(observed_bits_where(flags, to_bits(value)))


def observed_bits_where(flags: jax.Array, bits: jax.Array) -> jax.Array:
    """Return `observed_where` of bits, int32, as bits: `jax_debug_infs` stops at no constant among integers."""
    return lax.select(flags, bits, lax.full_like(bits, NOT_OBSERVED_BITS))


def is_observed(value: jax.Array) -> jax.Array:
    """Return, for decoded observations, where there is one; bool."""
    return lax.ne(to_bits(value), np.int32(NOT_OBSERVED_BITS))


def greatest_bits(history: jax.Array) -> jax.Array:
    """Return the bits of the greatest amax of a history, int32 []; `UNSOUND_BITS` if steps cannot have left all of it.

    Nothing that a step stores is negative, but for encoded zeros, which plain `jax.grad` leaves, and -inf: as integers
    they are below zero, and zero is the least result. An optimizer that subtracts the gradient makes amax negative; a
    SUM of encoded zeros is below each of them.
    """
    bits = to_bits(history)
    # below zero, from the binade above that of encoded zeros to the greatest finite number
    unsound = lax.bitwise_and(
        lax.ge(bits, np.int32(SIGN_BIT + 2 * SMALLEST_NORMAL_KEY)), lax.lt(bits, np.int32(SIGN_BIT + INFINITY_KEY))
    )
    # One reduction for both: XLA on CPUs compiles several loops for each.
    return _greatest(lax.max(lax.select(unsound, lax.full_like(bits, UNSOUND_BITS), bits), np.int32(0)))


def _greatest(keys: jax.Array) -> jax.Array:
    length = keys.size
    rows = next((n for n in range(FEW, 1, -1) if length % n == 0 and length // n <= FEW), None)
    if rows is None:
        return jnp.max(keys)
    # Behind a barrier, or XLA makes one reduction of the two.
    return jnp.max(lax.optimization_barrier(jnp.max(keys.reshape(rows, -1), axis=0)))


def maximum(x: jax.Array, y: jax.Array) -> jax.Array:
    """Return the greater observation, subnormals included, which XLA's float maximum takes for zero."""
    return from_ordered(lax.max(to_ordered(x), to_ordered(y)))


def maximum_over(x: jax.Array, axis: int) -> jax.Array:
    """Return the greatest observation along an axis, which must not be empty."""
    return from_ordered(jnp.max(to_ordered(x), axis=axis))


def to_ordered(x: jax.Array) -> jax.Array:
    """Return int32 that sort as the float32 `x` do; what collectives take the maximum of."""
    bits = to_bits(x)
    # Of negative floats the greater has the smaller bits: turn their order round.
    return _turned(bits)


def from_ordered(keys: jax.Array) -> jax.Array:
    """Undo `to_ordered`."""
    return from_bits(_turned(keys))


def _turned(bits: jax.Array) -> jax.Array:
    return lax.select(lax.lt(bits, np.int32(0)), lax.bitwise_xor(bits, np.int32(0x7FFFFFFF)), bits)
