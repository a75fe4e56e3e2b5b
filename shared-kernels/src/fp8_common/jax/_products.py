"""Products and quotients of float32 that are exact although XLA flushes subnormals: both ways of a scale.

XLA on CPUs treats subnormal operands as zero and replaces subnormal results by zero. A subnormal is an
integer times 2^-149, so an operand becomes that integer with the power of two moved to the scale, and a
result is assembled by integer rounding. Nothing here depends on whether the hardware flushes.
"""

import jax
import jax.numpy as jnp
from jax import lax

from fp8_common._amax import INF_KEY, KEY_MASK, MIN_NORMAL_KEY
from fp8_common.jax._arrays import (
    EXPONENT_MASK,
    HIDDEN_BIT,
    MANTISSA_MASK,
    SIGN_MASK,
    float_key,
    from_bits,
    to_bits,
)

LIFT = 64
"""Small scales are carried multiplied by 2^64, and the product lowered again."""
LIFT_BELOW_KEY = (127 - 100) << 23
"""Scales back from FP8 below 2^-100 are lifted: only their products with FP8 values can be subnormal."""


def product_into(x: jax.Array, scale: jax.Array) -> jax.Array:
    """Return RN32(x * scale), right for every product of at least 2^-100 in magnitude, whatever its operands.

    Smaller products may come out as zero of the right sign: they round to zero in every FP8 format. A
    subnormal x matters where scale > 2^100, a subnormal scale where x is huge.

    Args:
        x: float32, any shape.
        scale: float32, of the same number of dimensions, broadcastable to `x`.
    """
    lifted, lowering, for_subnormal = _prepare_scale(scale)
    bits = to_bits(x)
    # The bits of a subnormal, read as an integer, count its steps of 2^-149: below 2^23, so that the conversion is
    # exact.
    magnitude = to_bits((bits & jnp.int32(KEY_MASK)).astype(jnp.float32))
    integer = from_bits(magnitude | (bits & jnp.int32(SIGN_MASK)))
    # Zeros are among them, as the integer 0.
    is_subnormal = (bits & jnp.int32(EXPONENT_MASK)) == 0
    return jnp.where(is_subnormal, integer * for_subnormal, x * lifted) * lowering


def _prepare_scale(scale: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the scale with subnormals lifted, what lowers the product again, and scale * 2^-149."""
    key, sign = float_key(scale), to_bits(scale) & jnp.int32(SIGN_MASK)
    small = key < MIN_NORMAL_KEY
    integer = key.astype(jnp.float32) * jnp.float32(2.0 ** (LIFT - 149))
    lifted = jnp.where(small, from_bits(to_bits(integer) | sign), scale)
    lowering = jnp.where(small, jnp.float32(2.0**-LIFT), jnp.float32(1))
    # By bits, because XLA folds two factors into one, and 2^-149 would be flushed.
    reduced = jnp.maximum(key - jnp.int32(149 << 23), 0)
    for_subnormal = from_bits(jnp.where(key < INF_KEY, reduced, key) | sign)
    # The barrier makes XLA compute these once per scale instead of once per element.
    return lax.optimization_barrier((lifted, lowering, for_subnormal))


def product_back(values: jax.Array, scale_inv: jax.Array) -> jax.Array:
    """Return RN32(values * scale_inv) exactly, subnormal results included.

    Args:
        values: float32 values of an FP8 format, any shape: at most four significant bits, zero or >= 2^-17.
        scale_inv: float32, of the same number of dimensions, broadcastable to `values`; subnormals included.
    """
    lifted, lowered_by, significand, exponent = _prepare_scale_inv(scale_inv)
    bits = to_bits(values * lifted)
    field = bits & jnp.int32(EXPONENT_MASK)
    step = _small_product(values, significand, exponent)
    small = step | (bits & jnp.int32(SIGN_MASK))
    normal = jnp.where(field == EXPONENT_MASK, bits, bits - lowered_by)
    return from_bits(jnp.where(field > lowered_by, normal, small))


def _prepare_scale_inv(scale_inv: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Return the scale lifted, by how much (added to its bits), and its magnitude as integer and exponent."""
    key, sign = float_key(scale_inv), to_bits(scale_inv) & jnp.int32(SIGN_MASK)
    # 2^64 times as large: a subnormal by converting its integer, other small scales by their exponent.
    from_integer = to_bits(key.astype(jnp.float32)) - jnp.int32((149 - LIFT) << 23)
    raised = jnp.where(key < MIN_NORMAL_KEY, from_integer, key + jnp.int32(LIFT << 23))
    raised = jnp.where(key == 0, 0, raised)
    is_small = key < LIFT_BELOW_KEY
    lifted = from_bits(jnp.where(is_small, raised, key) | sign)
    lowered_by = jnp.where(is_small, jnp.int32(LIFT << 23), jnp.int32(0))
    significand = jnp.where(raised == 0, 0, (raised & jnp.int32(MANTISSA_MASK)) | jnp.int32(HIDDEN_BIT))
    exponent = raised >> 23
    return lax.optimization_barrier((lifted, lowered_by, significand, exponent))


def _small_product(values: jax.Array, significand: jax.Array, exponent: jax.Array) -> jax.Array:
    """Return |values * scale_inv| in units of 2^-149, rounded to nearest even, where that is below 2^23."""
    key = float_key(values)
    # The leading bit and the three mantissa bits that E4M3 has at most.
    digits = jnp.where(key == 0, 0, ((key & jnp.int32(MANTISSA_MASK)) | jnp.int32(HIDDEN_BIT)) >> 20)
    product = digits * significand
    # values = digits * 2^(key>>23 - 130) and scale_inv = significand * 2^(exponent - LIFT - 150).
    shift = jnp.clip(jnp.int32(131 + LIFT) - (key >> 23) - exponent, 1, 30)
    # The limits of the shift: the product is below 2^28, so that 30 gives zero as every larger one would; where it
    # would be below 1 the result is normal, and not taken from here.
    half = lax.shift_left(jnp.int32(1), shift - 1)
    odd = lax.shift_right_logical(product, shift) & jnp.int32(1)
    return lax.shift_right_logical(product + (half - 1) + odd, shift)
