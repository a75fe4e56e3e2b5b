"""Conversion of numbers to FP8 codes, to nearest or stochastically, and back.

The cast consists of integer operations and one float addition. XLA's own conversion does not saturate (overflow becomes
NaN in E4M3, infinity in E5M2), and is several times slower on CPUs. On NVIDIA GPUs it is two instructions, so
`round_to_native` uses it there, after a clamp.
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
    NAN_KEY,
    as_float32,
    as_native,
    float_key,
    from_bits,
    to_bits,
    to_uint8_codes,
)

QUIET_BIT = np.int32(1 << 22)
"""Bit that makes a quiet NaN of the bits of infinity."""


def encode(x: ArrayLike, fmt: str | Format) -> jax.Array:
    """Round to the nearest value of a format; return uint8 codes.

    Ties are rounded to even. The gradient is zero.

    Args:
        x: float16, bfloat16 or float32, any shape.
        fmt: Data format or its name; static under jit.

    Returns:
        uint8 codes of the shape of `x`, equal to `fp8_common.numerics.encode`.

    Raises:
        Fp8Error: If the dtype or the format is not supported.
    """
    return _encode(as_float32(x), fmt=get_data_format(fmt))


def encode_stochastic(x: ArrayLike, fmt: str | Format, random_bits: ArrayLike) -> jax.Array:
    """Round stochastically to a value of a format; return uint8 codes.

    The gradient is zero. See `fp8_common.numerics.encode_stochastic`.

    Args:
        x: float16, bfloat16 or float32, any shape.
        fmt: Data format or its name; static under jit.
        random_bits: uint32 of the shape of `x`, for example `jax.random.bits(key, x.shape)`.

    Returns:
        uint8 codes of the shape of `x`, equal to `fp8_common.numerics.encode_stochastic` for the same bits.

    Raises:
        Fp8Error: If the shapes differ, `random_bits` is not uint32, or `x` or `fmt` is not supported.
    """
    value, fmt = as_float32(x), get_data_format(fmt)
    return _encode_stochastic(value, check_random_bits(random_bits, value.shape), fmt=fmt)


def decode(codes: ArrayLike, fmt: str | Format) -> jax.Array:
    """Return the float32 values of codes; exact for all formats.

    Args:
        codes: uint8 or the format's own dtype, any shape.
        fmt: Format or its name, including E8M0; static under jit.

    Raises:
        Fp8Error: If `codes` is neither uint8 nor of the format's own dtype.
    """
    fmt = get_format(fmt)
    return _decode(to_uint8_codes(codes, fmt), fmt=fmt)


def check_random_bits(random_bits: ArrayLike, shape: tuple[int, ...]) -> jax.Array:
    """Return random bits as an array if they are uint32 of `shape`.

    Raises:
        Fp8Error: If they have another dtype or shape.
    """
    dtype, got = getattr(random_bits, "dtype", type(random_bits).__name__), np.shape(random_bits)
    if dtype != np.uint32 or got != tuple(shape):
        raise Fp8Error(
            f"random_bits must be uint32 of shape {tuple(shape)}, got {dtype} of shape {got}. "
            "Draw them with jax.random.bits(key, x.shape)."
        )
    return jnp.asarray(random_bits)


def nan_where_infinite(x: jax.Array) -> jax.Array:
    """Replace infinities of float32 `x` by NaN.

    Casts call it before they multiply by the scale, because a finite number that overflows there saturates.
    """
    is_infinite = lax.convert_element_type(lax.eq(float_key(x), np.int32(INF_KEY)), np.int32)
    return from_bits(lax.bitwise_or(to_bits(x), lax.mul(is_infinite, QUIET_BIT)))


def round_to_codes(x: jax.Array, fmt: Format, invalid: jax.Array | None = None) -> jax.Array:
    """Return uint8 codes of float32 `x`, rounded to nearest even.

    Larger magnitudes saturate, also infinity. Adding 2^(e+23-m) to a value of binade e leaves m mantissa bits, rounded
    by the hardware.

    Args:
        x: float32, any shape.
        fmt: FP8 format.
        invalid: bool of the shape of `x`: elements that get the NaN code; no other element may be NaN. None selects
            the elements that are NaN.
    """
    bits = to_bits(lax.stop_gradient(x))
    magnitude, base = _magnitude_and_binade(bits, fmt)
    # XLA flushes a subnormal x in this sum, which rounds to 0 in all formats.
    magic = lax.add(base, np.int32((23 - fmt.mantissa_bits) << 23))
    steps = lax.sub(to_bits(lax.add(from_bits(magnitude), from_bits(magic))), magic)
    return _assemble(bits, base, steps, fmt, invalid)


def round_to_native(x: jax.Array, fmt: Format, invalid: jax.Array) -> jax.Array:
    """Return `round_to_codes` in the format's dtype.

    On NVIDIA GPUs, XLA converts E4M3 and E5M2.

    Args:
        x: float32, any shape.
        fmt: FP8 format.
        invalid: bool of the shape of `x`: elements that get the NaN code, with the sign of `x`.
    """

    def by_bits(x: jax.Array, invalid: jax.Array) -> jax.Array:
        return as_native(round_to_codes(x, fmt, invalid), fmt)

    converts = fmt in (E4M3, E5M2)
    return lax.platform_dependent(x, invalid, cuda=partial(_converted, fmt) if converts else by_bits, default=by_bits)


def _converted(fmt: Format, x: jax.Array, invalid: jax.Array) -> jax.Array:
    limit = np.float32(fmt.max)
    values = lax.convert_element_type(lax.clamp(-limit, x, limit), fmt.numpy_dtype)
    # The conversion loses the sign of NaN. Codes are selected as integers, because XLA computes float8 in float16.
    sign = lax.bitwise_and(lax.shift_right_logical(to_bits(x), np.int32(24)), np.int32(0x80))
    nan = lax.convert_element_type(lax.bitwise_or(sign, np.int32(fmt.nan_code)), np.uint8)
    codes = lax.select(invalid, nan, lax.bitcast_convert_type(values, np.uint8))
    # With the barrier, the partitioner gathers FP8 values; without it, it may gather x and cast it again.
    return lax.optimization_barrier(as_native(codes, fmt))


def round_to_codes_at_random(x: jax.Array, random_bits: jax.Array, fmt: Format) -> jax.Array:
    """Return uint8 codes of float32 `x`, rounded stochastically.

    A magnitude is rounded up if the random threshold is below its fraction. All steps are exact in float32: values are
    multiplied by a power of two to reach the grid, and the threshold has 24 bits.
    """
    bits = to_bits(lax.stop_gradient(x))
    magnitude, base = _magnitude_and_binade(bits, fmt)
    # 2^(mantissa_bits - e), built from exponent fields
    to_grid = from_bits(jnp.int32((127 + fmt.mantissa_bits) << 23) - (base - jnp.int32(127 << 23)))
    grid = from_bits(magnitude) * to_grid
    below = lax.floor(grid)
    # 23 random bits and a 1 below them: never 0, so that values of the format, whose fraction is 0, do not change.
    drawn = lax.shift_right_logical(random_bits, jnp.uint32(9)) * jnp.uint32(2) + jnp.uint32(1)
    threshold = drawn.astype(jnp.float32) * jnp.float32(2.0**-24)
    steps = below.astype(jnp.int32) + (threshold < grid - below).astype(jnp.int32)
    return _assemble(bits, base, steps, fmt)


# From here on, `lax` primitives are used, because `jnp` traces a function for each operator, and casts are traced for
# each shape.
def _magnitude_and_binade(bits: jax.Array, fmt: Format) -> tuple[jax.Array, jax.Array]:
    """Return the bits of min(|x|, max), and of its power of two.

    The power of two is at least the smallest normal value of the format.
    """
    limit = np.float32(fmt.max).view(np.int32)
    magnitude = lax.min(lax.bitwise_and(bits, np.int32(KEY_MASK)), limit)
    smallest = np.int32((fmt.min_exponent + 127) << 23)
    return magnitude, lax.max(lax.bitwise_and(magnitude, np.int32(INF_KEY)), smallest)


def _assemble(
    bits: jax.Array, base: jax.Array, steps: jax.Array, fmt: Format, invalid: jax.Array | None = None
) -> jax.Array:
    """Combine binade, mantissa, sign and NaN into uint8 codes.

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
    # NaN has the code of the largest magnitude here. A difference is added, because selecting a constant would need an
    # array of the shape of `x`, which loops pass in as an operand.
    to_nan = lax.convert_element_type(is_nan, np.int32)
    if fmt.nan_code != fmt.max_code + 1:
        to_nan = lax.mul(to_nan, np.int32(fmt.nan_code - fmt.max_code))
    return lax.convert_element_type(lax.bitwise_or(lax.add(code, to_nan), sign), np.uint8)


def decode_codes(codes: jax.Array, fmt: Format) -> jax.Array:
    """Return the float32 values of uint8 codes, by integer operations."""
    code = lax.stop_gradient(codes).astype(jnp.int32)
    if fmt == E8M0:
        # A code is the exponent field of its value, except code 0, 2^-127, which is subnormal in float32.
        bits = jnp.where(code == 0, jnp.int32(1 << 22), code << 23)
        return from_bits(jnp.where(code == fmt.nan_code, jnp.int32(NAN_KEY), bits))
    # Bit 7 becomes bit 31, the sign.
    magnitude, sign = code & 0x7F, (code & 0x80) << 24
    # A subnormal of FP8 is normal in float32, so XLA does not flush it.
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
