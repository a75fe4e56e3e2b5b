"""Division of float32, rounded to nearest on every device: XLA's own is up to two units off on GPUs.

There XLA divides by `div.full.f32`, which also returns zero for denominators above 2^126. The quotient of the
significands is therefore taken as an estimate and mended with its remainder, by integers.
"""

import jax
import jax.numpy as jnp
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


@jax.named_scope("divide_nearest")
def _mended(numerator: jax.Array, denominator: jax.Array) -> jax.Array:
    """Return the quotient of two float32 arrays of one shape, from the estimated one of their significands."""
    above, below = float_key(numerator), float_key(denominator)
    significands = [from_bits((key & jnp.int32(MANTISSA_MASK)) | jnp.int32(ONE_BITS)) for key in (above, below)]
    quotient = nearest_quotient(lax.div(*significands), *significands)
    field = (float_key(quotient) >> 23) + (above >> 23) - (below >> 23)
    bits = (field << 23) | (float_key(quotient) & jnp.int32(MANTISSA_MASK))
    bits = jnp.where(field >= 255, jnp.int32(INF_KEY), jnp.where(field <= 0, 0, bits))
    usual = (_is_normal(above)) & _is_normal(below)
    return jnp.where(usual, from_bits(bits), lax.div(numerator, denominator))


def nearest_quotient(estimate: jax.Array, numerator: jax.Array, denominator: jax.Array) -> jax.Array:
    """Return RN32(numerator / denominator) from an estimate that is at most two units in the last place off.

    The remainder is computed modulo 2^32, which is enough: it is smaller than three denominators. No ties exist.

    Args:
        estimate: float32, near the quotient.
        numerator: float32 in [1, 2), of the same shape.
        denominator: float32 in [1, 2), of the same shape.
    """
    dividend, divisor = (
        (float_key(x) & jnp.int32(MANTISSA_MASK)) | jnp.int32(HIDDEN_BIT) for x in (numerator, denominator)
    )
    halved = (dividend < divisor).astype(jnp.int32)  # the quotient is in [1/2, 1), otherwise in [1, 2)
    lowest = jnp.int32(ONE_BITS) - (halved << 23)
    # An estimate beyond the interval would have another unit in the last place.
    bits = jnp.clip(float_key(estimate), lowest, lowest | jnp.int32(MANTISSA_MASK))
    significand = (bits & jnp.int32(MANTISSA_MASK)) | jnp.int32(HIDDEN_BIT)
    twice_left = 2 * ((dividend << (23 + halved)) - significand * divisor)
    for odd in (1, 3):
        bits += (twice_left > odd * divisor).astype(jnp.int32) - (twice_left < -odd * divisor).astype(jnp.int32)
    return from_bits(bits)


def _is_normal(key: jax.Array) -> jax.Array:
    return (key > jnp.int32(MANTISSA_MASK)) & (key < jnp.int32(INF_KEY))
