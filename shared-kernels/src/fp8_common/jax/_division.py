"""Division of float32, rounded to nearest on every device: XLA's own is up to two units off on GPUs.

There XLA divides by `div.full.f32`, which also returns zero for denominators above 2^126. The quotient of the
significands is therefore taken as an estimate and mended with its remainder, by integers.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fp8_common._amax import INF_KEY, MIN_NORMAL_KEY
from fp8_common.jax._arrays import HIDDEN_BIT, MANTISSA_MASK, float_key, from_bits, to_bits

ONE_BITS = 0x3F800000
"""The bits of 1.0: with another mantissa, those of a number in [1, 2)."""


def divide_nearest(numerator: float | jax.Array, denominator: jax.Array) -> jax.Array:
    """Return RN32(numerator / denominator); quotients below 2^-126 may come out as zero.

    Args:
        numerator: float32, not negative: a number, or an array of the denominator's shape.
        denominator: float32, any shape, not negative; zero, infinity and NaN give what IEEE division gives. Subnormals
            count as zero.
    """
    return _quotient(jnp.broadcast_to(jnp.asarray(numerator, jnp.float32), denominator.shape), denominator)


# A function of its own in the traced program, so that divisions of equal shapes are traced and lowered once.
@jax.jit
def _quotient(numerator: jax.Array, denominator: jax.Array) -> jax.Array:
    # Behind a barrier, and of equal shapes: XLA turns a division by a constant or a broadcast into a product with the
    # reciprocal, which rounds twice. Both are, or loops would compute what depends on a constant numerator outside.
    return lax.platform_dependent(*lax.optimization_barrier((numerator, denominator)), cpu=lax.div, default=_mended)


def divide(numerator: float, denominator: jax.Array) -> jax.Array:
    """Return RN32(numerator / denominator), exact where the denominator is subnormal or zero.

    Args:
        numerator: Positive normal float32 of at least 2^-20, so that these quotients are huge.
        denominator: float32, any shape, not negative.

    Returns:
        float32; quotients below 2^-126 may come out as zero.
    """
    key = float_key(denominator)
    small = key < MIN_NORMAL_KEY
    usable = jnp.where(small, key.astype(jnp.float32), denominator)
    quotient = divide_nearest(numerator, usable)
    raised = _times_2_to_149(quotient)
    return jnp.where(small, raised, quotient)


def _times_2_to_149(x: jax.Array) -> jax.Array:
    """Return positive normal x * 2^149, infinity on overflow; by bits, because 2^149 is no float32."""
    bits = to_bits(x)
    overflows = (bits >> 23) + 149 >= 255
    return from_bits(jnp.where(overflows, jnp.int32(INF_KEY), bits + jnp.int32(149 << 23)))


# Primitives from here on, where `jnp` would trace a function for each operator: every program that casts traces this.
@jax.named_scope("divide_nearest")
def _mended(numerator: jax.Array, denominator: jax.Array) -> jax.Array:
    """Return the quotient of two float32 arrays of one shape, from the estimated one of their significands."""
    above, below = float_key(numerator), float_key(denominator)
    significands = [from_bits(_with_mantissa(ONE_BITS, key)) for key in (above, below)]
    quotient = float_key(nearest_quotient(lax.div(*significands), *significands))
    exponents = [lax.shift_right_arithmetic(key, np.int32(23)) for key in (quotient, above, below)]
    field = lax.sub(lax.add(exponents[0], exponents[1]), exponents[2])
    bits = lax.bitwise_or(lax.shift_left(field, np.int32(23)), lax.bitwise_and(quotient, np.int32(MANTISSA_MASK)))
    bits = lax.select(lax.le(field, np.int32(0)), lax.full_like(bits, 0), bits)
    bits = lax.select(lax.ge(field, np.int32(255)), lax.full_like(bits, INF_KEY), bits)
    usual = lax.bitwise_and(_is_normal(above), _is_normal(below))
    return lax.select(usual, from_bits(bits), lax.div(numerator, denominator))


def nearest_quotient(estimate: jax.Array, numerator: jax.Array, denominator: jax.Array) -> jax.Array:
    """Return RN32(numerator / denominator) from an estimate that is at most two units in the last place off.

    The remainder is computed modulo 2^32, which is enough: it is smaller than three denominators. No ties exist.

    Args:
        estimate: float32, near the quotient.
        numerator: float32 in [1, 2), of the same shape.
        denominator: float32 in [1, 2), of the same shape.
    """
    dividend, divisor = (_with_mantissa(HIDDEN_BIT, float_key(x)) for x in (numerator, denominator))
    halved = _as_int(lax.lt(dividend, divisor))  # the quotient is in [1/2, 1), otherwise in [1, 2)
    lowest = lax.sub(np.int32(ONE_BITS), lax.shift_left(halved, np.int32(23)))
    # An estimate beyond the interval would have another unit in the last place.
    bits = lax.clamp(lowest, float_key(estimate), lax.bitwise_or(lowest, np.int32(MANTISSA_MASK)))
    product = lax.mul(_with_mantissa(HIDDEN_BIT, bits), divisor)
    left = lax.sub(lax.shift_left(dividend, lax.add(halved, np.int32(23))), product)
    twice_left = lax.mul(left, np.int32(2))
    for odd in (1, 3):
        limit = lax.mul(divisor, np.int32(odd))
        above, below = lax.gt(twice_left, limit), lax.lt(twice_left, lax.neg(limit))
        bits = lax.add(bits, lax.sub(_as_int(above), _as_int(below)))
    return from_bits(bits)


def _with_mantissa(upper: int, key: jax.Array) -> jax.Array:
    return lax.bitwise_or(lax.bitwise_and(key, np.int32(MANTISSA_MASK)), np.int32(upper))


def _as_int(flags: jax.Array) -> jax.Array:
    return lax.convert_element_type(flags, np.int32)


def _is_normal(key: jax.Array) -> jax.Array:
    return lax.bitwise_and(lax.gt(key, np.int32(MANTISSA_MASK)), lax.lt(key, np.int32(INF_KEY)))
