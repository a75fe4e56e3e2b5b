"""FP8 codes of numbers, rounded or random, and their values.

The cast is written with integer operations and one float addition instead of XLA's own conversion: that one does not
saturate (overflow becomes NaN in E4M3, infinity in E5M2), and on CPUs it is several times slower. On NVIDIA GPUs it is
two instructions, and `round_to_native` takes it there, behind a clamp.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from fp8_common._reference.scaling import INF_KEY, KEY_MASK
from fp8_common.errors import Fp8Error
from fp8_common.formats import E4M3, E5M2, E8M0, Format, get_data_format, get_format
from fp8_common.jax.numerics import (
    EXPONENT_MASK,
    NAN_KEY,
    as_float32,
    as_native,
    float_key,
    from_bits,
    to_bits,
    to_uint8_codes,
)

QUIET_BIT = np.int32(1 << 22)
"""Turns an infinity into a quiet NaN."""


def encode(x: ArrayLike, fmt: str | Format) -> jax.Array:
    """Round to the nearest value of `fmt`; return uint8 codes.

    Ties to even, saturating.

    The gradient is zero.

    Args:
        x: float16, bfloat16 or float32, any shape.
        fmt: A data format or its name; static under jit.

    Returns:
        uint8 codes of the shape of `x`, equal to `fp8_common.numerics.encode`.

    Raises:
        Fp8Error: If the dtype or the format is not supported.
    """
    return _encode(as_float32(x), fmt=get_data_format(fmt))


def encode_stochastic(x: ArrayLike, fmt: str | Format, random_bits: ArrayLike) -> jax.Array:
    """Round up or down at random; return uint8 codes.

    Up with the probability of the distance from below.

    The gradient is zero.

    Args:
        x: float16, bfloat16 or float32, any shape.
        fmt: A data format or its name; static under jit.
        random_bits: uint32, shape of `x`: `jax.random.bits(key, x.shape)`.

    Returns:
        uint8 codes of the shape of `x`, equal to `fp8_common.numerics.encode_stochastic` for the same bits.

    Raises:
        Fp8Error: If the shapes differ, `random_bits` is not uint32, or `x` or `fmt` is not supported.
    """
    value, fmt = as_float32(x), get_data_format(fmt)
    return _encode_stochastic(value, check_random_bits(random_bits, value.shape), fmt=fmt)


def decode(codes: ArrayLike, fmt: str | Format) -> jax.Array:
    """Return the float32 value of every code; exact for every format.

    Args:
        codes: uint8 or the format's own dtype, any shape.
        fmt: A format or its name, E8M0 included; static under jit.

    Raises:
        Fp8Error: If `codes` is neither uint8 nor of the format's own dtype.
    """
    fmt = get_format(fmt)
    return _decode(to_uint8_codes(codes, fmt), fmt=fmt)


def check_random_bits(random_bits: ArrayLike, shape: tuple[int, ...]) -> jax.Array:
    """Return the random bits as an array.

    Raises:
        Fp8Error: They are not uint32 of `shape`.
    """
    dtype, got = getattr(random_bits, "dtype", type(random_bits).__name__), np.shape(random_bits)
    if dtype != np.uint32 or got != tuple(shape):
        raise Fp8Error(
            f"random_bits must be uint32 of shape {tuple(shape)}, got {dtype} of shape {got}. "
            "Draw them with jax.random.bits(key, x.shape)."
        )
    return jnp.asarray(random_bits)


def nan_where_infinite(x: jax.Array) -> jax.Array:
    """Return float32 `x` with NaN for infinity.

    Casts do so before they multiply by a scale: a finite number that overflows there saturates.
    """
    is_infinite = lax.convert_element_type(lax.eq(float_key(x), np.int32(INF_KEY)), np.int32)
    return from_bits(lax.bitwise_or(to_bits(x), lax.mul(is_infinite, QUIET_BIT)))


def round_to_codes(x: jax.Array, fmt: Format, invalid: jax.Array | None = None) -> jax.Array:
    """Return uint8 codes of float32 `x`, rounded to nearest even.

    Saturated, infinity too.

    The NaN code stands where `invalid` is true, or where `x` is NaN if that is None; no other element may be NaN.
    Adding 2^(e+23-m) to a value of binade e leaves m mantissa bits, rounded by the hardware's own rule.
    """
    bits = to_bits(lax.stop_gradient(x))
    magnitude, base = _magnitude_and_binade(bits, fmt)
    # XLA flushes a subnormal x in this sum; it rounds to 0 in every format anyway.
    magic = lax.add(base, np.int32((23 - fmt.mantissa_bits) << 23))
    steps = lax.sub(to_bits(lax.add(from_bits(magnitude), from_bits(magic))), magic)
    return _assemble(bits, base, steps, fmt, invalid)


def round_to_native(x: jax.Array, fmt: Format, invalid: jax.Array) -> jax.Array:
    """Return `round_to_codes` in the format's dtype.

    By XLA's conversion on NVIDIA GPUs.

    Args:
        x: float32, any shape.
        fmt: FP8 format.
        invalid: Where the NaN code stands, with the sign of `x`; bool of the shape of `x`.
    """

    def by_bits(x: jax.Array, invalid: jax.Array) -> jax.Array:
        return as_native(round_to_codes(x, fmt, invalid), fmt)

    converts = fmt in (E4M3, E5M2)
    return lax.platform_dependent(x, invalid, cuda=partial(_converted, fmt) if converts else by_bits, default=by_bits)


def _converted(fmt: Format, x: jax.Array, invalid: jax.Array) -> jax.Array:
    limit = np.float32(fmt.max)
    values = lax.convert_element_type(lax.clamp(-limit, x, limit), fmt.numpy_dtype)
    # A NaN of the conversion has no sign. Selected as integers: XLA computes with float8 as with float16.
    sign = lax.bitwise_and(lax.shift_right_logical(to_bits(x), np.int32(24)), np.int32(0x80))
    nan = lax.convert_element_type(lax.bitwise_or(sign, np.int32(fmt.nan_code)), np.uint8)
    codes = lax.select(invalid, nan, lax.bitcast_convert_type(values, np.uint8))
    # The partitioner gathers the values after the barrier; without one it may gather wider values and cast them again.
    return lax.optimization_barrier(as_native(codes, fmt))


def round_to_codes_at_random(x: jax.Array, random_bits: jax.Array, fmt: Format) -> jax.Array:
    """Return uint8 codes of float32 `x`, rounded at random.

    Up if the random threshold is below the fraction.

    Every step is exact in float32: the grid is reached by a power of two, and the threshold has 24 bits.
    """
    bits = to_bits(lax.stop_gradient(x))
    magnitude, base = _magnitude_and_binade(bits, fmt)
    # 2^(mantissa_bits - e), made of exponent fields.
    to_grid = from_bits(jnp.int32((127 + fmt.mantissa_bits) << 23) - (base - jnp.int32(127 << 23)))
    grid = from_bits(magnitude) * to_grid
    below = lax.floor(grid)
    # 23 random bits and a 1 below them: never 0, so that a value of the format, whose fraction is 0, does not move.
    drawn = lax.shift_right_logical(random_bits, jnp.uint32(9)) * jnp.uint32(2) + jnp.uint32(1)
    threshold = drawn.astype(jnp.float32) * jnp.float32(2.0**-24)
    steps = below.astype(jnp.int32) + (threshold < grid - below).astype(jnp.int32)
    return _assemble(bits, base, steps, fmt)


# Primitives from here on, where `jnp` would trace a function for each operator: casts are traced for every shape.
def _magnitude_and_binade(bits: jax.Array, fmt: Format) -> tuple[jax.Array, jax.Array]:
    """Return the bits of min(|x|, max) and of its binade.

    The binade is at least the smallest normal's.
    """
    limit = np.float32(fmt.max).view(np.int32)
    magnitude = lax.min(lax.bitwise_and(bits, np.int32(KEY_MASK)), limit)
    smallest = np.int32((fmt.min_exponent + 127) << 23)
    return magnitude, lax.max(lax.bitwise_and(magnitude, np.int32(EXPONENT_MASK)), smallest)


def _assemble(
    bits: jax.Array, base: jax.Array, steps: jax.Array, fmt: Format, invalid: jax.Array | None = None
) -> jax.Array:
    """Combine binade, mantissa, sign and NaN; carries flow upwards.

    A carry of the mantissa increments the exponent.
    """
    offset = np.int32((fmt.min_exponent + 127) << fmt.mantissa_bits)
    field = lax.shift_right_arithmetic(base, np.int32(23 - fmt.mantissa_bits))
    code = lax.sub(lax.add(field, steps), offset)
    sign = lax.bitwise_and(lax.shift_right_arithmetic(bits, np.int32(24)), np.int32(0x80))
    is_nan = lax.gt(lax.bitwise_and(bits, np.int32(KEY_MASK)), np.int32(INF_KEY)) if invalid is None else invalid
    if fmt.fnuz:
        signed = jnp.where(code == 0, 0, code | sign)
        return jnp.where(is_nan, jnp.int32(fmt.nan_code), signed).astype(jnp.uint8)
    # A NaN has been limited to the greatest magnitude by now. A constant to select would be an array of the shape of
    # `x`, and loops hand it in.
    to_nan = lax.convert_element_type(is_nan, np.int32)
    if fmt.nan_code != fmt.max_code + 1:
        to_nan = lax.mul(to_nan, np.int32(fmt.nan_code - fmt.max_code))
    return lax.convert_element_type(lax.bitwise_or(lax.add(code, to_nan), sign), np.uint8)


def decode_codes(codes: jax.Array, fmt: Format) -> jax.Array:
    """Return float32 values of uint8 codes, by integer operations."""
    code = lax.stop_gradient(codes).astype(jnp.int32)
    if fmt == E8M0:
        # A code is the exponent field of its value, except code 0, 2^-127, which is subnormal in float32.
        bits = jnp.where(code == 0, jnp.int32(1 << 22), code << 23)
        return from_bits(jnp.where(code == fmt.nan_code, jnp.int32(NAN_KEY), bits))
    # Bit 7 moves to bit 31, the sign of the int32.
    magnitude, sign = code & 0x7F, (code & 0x80) << 24
    # Subnormal in FP8, normal in float32: XLA does not flush it.
    subnormal = magnitude.astype(jnp.float32) * jnp.float32(fmt.smallest_subnormal)
    normal = (magnitude << (23 - fmt.mantissa_bits)) + jnp.int32((127 - fmt.bias) << 23)
    bits = jnp.where(magnitude < 1 << fmt.mantissa_bits, to_bits(subnormal), normal)
    if fmt.fnuz:
        bits = jnp.where(code == fmt.nan_code, jnp.int32(NAN_KEY), bits)
    elif fmt.has_infinity:
        bits = jnp.where(magnitude > fmt.max_code + 1, jnp.int32(NAN_KEY), bits)
        bits = jnp.where(magnitude == fmt.max_code + 1, jnp.int32(INF_KEY), bits)
    else:
        bits = jnp.where(magnitude > fmt.max_code, jnp.int32(NAN_KEY), bits)
    return from_bits(bits | sign)


@partial(jax.jit, static_argnames="fmt", inline=True)
def _encode(x: jax.Array, *, fmt: Format) -> jax.Array:
    return round_to_codes(nan_where_infinite(x), fmt)


@partial(jax.jit, static_argnames="fmt", inline=True)
def _encode_stochastic(x: jax.Array, bits: jax.Array, *, fmt: Format) -> jax.Array:
    return round_to_codes_at_random(nan_where_infinite(x), bits, fmt)


_decode = jax.jit(decode_codes, static_argnames="fmt", inline=True)
