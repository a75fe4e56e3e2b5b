"""Accepted arrays, float32 bits as integers, and exact arithmetic.

Integers matter here more than elsewhere: XLA on CPUs treats subnormal operands of float operations as zero and replaces
subnormal results by zero, so exact numbers are compared, selected and assembled on bits. A subnormal is an integer
times 2^-149: an operand becomes that integer with the power of two moved to the scale, and a result is assembled by
integer rounding.

XLA divides on GPUs by `div.full.f32`, which is up to two units off and returns zero for denominators above 2^126: the
quotient of the significands is an estimate, corrected with its remainder by integers.
"""

from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import ShapedArray
from jax.sharding import get_abstract_mesh
from jax.typing import ArrayLike

from fp8_common._reference.scaling import INF_KEY, INPUT_DTYPES, KEY_MASK, MIN_NORMAL_KEY
from fp8_common.errors import Fp8Error, Fp8UnsupportedError
from fp8_common.formats import Format, get_format
from fp8_common.jax.compat import PROBLEM

Tree = TypeVar("Tree")

SIGN_MASK = -(2**31)
"""The sign of float32 bits, as an int32."""
EXPONENT_MASK = 0x7F800000
MANTISSA_MASK = 0x007FFFFF
HIDDEN_BIT = 0x00800000
NAN_KEY = 0x7FC00000
"""Put where a NaN belongs as bits, so that `jax_debug_nans` stops at none that were not there."""
ONE_BITS = 0x3F800000
"""The bits of 1.0: with another mantissa, the bits of a number in [1, 2)."""
LIFT = 64
"""Subnormal operands are carried multiplied by 2^64, and results lowered again."""


# ---------------------------------------------------------------- checks


def as_input(x: ArrayLike, what: str = "x") -> jax.Array:
    """Return `x` as an array in its dtype.

    Args:
        x: Array (NumPy, JAX or traced) of float16, bfloat16 or float32.
        what: The name of the argument in errors.

    Raises:
        Fp8Error: If `x` has another dtype; Python numbers and lists of them count as float64.
    """
    dtype = _dtype(x)
    if dtype not in INPUT_DTYPES:
        raise Fp8Error(f"{what} must be float16, bfloat16 or float32, got {dtype}. Convert it to float32 first.")
    return jnp.asarray(x, dtype)


def as_float32(x: ArrayLike, what: str = "x") -> jax.Array:
    """Return `x` as exact float32; arguments and errors as in `as_input`."""
    return as_input(x, what).astype(jnp.float32)


def to_uint8_codes(codes: ArrayLike, fmt: str | Format) -> jax.Array:
    """Return `codes` as uint8, bitcasting arrays of the format's own dtype.

    Raises:
        Fp8Error: If the dtype is neither uint8 nor the format's own.
    """
    dtype, native = _dtype(codes), get_format(fmt).numpy_dtype
    if dtype not in (np.dtype(np.uint8), native):
        raise Fp8Error(f"FP8 codes must be uint8 or {native.name}, got {dtype}.")
    array = jnp.asarray(codes, dtype)
    return array if dtype == np.uint8 else lax.bitcast_convert_type(array, jnp.uint8)


def as_native(codes: jax.Array, fmt: Format) -> jax.Array:
    """Return uint8 codes in the format's dtype, bit for bit."""
    return lax.bitcast_convert_type(codes, fmt.numpy_dtype)


def broadcast_scale(scale: ArrayLike, shape: tuple[int, ...], what: str = "scale") -> jax.Array:
    """Return `scale` as float32 with the dimensions of `shape`.

    Each dimension has length 1 or `shape`'s.

    It is not broadcast further, so that work on scales stays as small as the scales.

    Raises:
        Fp8Error: If the dtype is not supported, or `scale` does not broadcast to `shape`.
    """
    array = as_float32(scale, what)
    missing = len(shape) - array.ndim
    fits = missing >= 0 and all(n in (1, m) for n, m in zip(array.shape, shape[missing:], strict=True))
    if not fits:
        raise Fp8Error(f"{what} of shape {array.shape} does not broadcast to {tuple(shape)}.")
    return array.reshape((1,) * missing + array.shape)


def _dtype(x: ArrayLike) -> np.dtype:
    # Not the dtype that JAX would give it: jnp.asarray makes float32 of a Python number, and its rounding would pass
    # unseen.
    return x.dtype if hasattr(x, "dtype") else np.asarray(x).dtype


# ---------------------------------------------------------------- axes of shard_map


def varying_axes(x: Any) -> frozenset[str]:
    """Return the mesh axes along which a value may differ.

    The value is an array or an abstract value.

    Empty outside of `shard_map(..., check_vma=True)`.

    Raises:
        Fp8UnsupportedError: Inside of a `shard_map`, with a JAX whose types do not show it.
    """
    aval = x if isinstance(x, ShapedArray) else jax.typeof(x)
    # Newer versions of JAX keep these axes in the attribute `mat` ("manual axis type"), older ones in `vma`.
    if (manual := getattr(aval, "mat", None)) is not None:
        return frozenset(manual.varying)
    # No default: with one, a renamed attribute lost the axes, and an amax was one device's.
    if (axes := getattr(aval, "vma", None)) is None and get_abstract_mesh().manual_axes:
        raise Fp8UnsupportedError(f"FP8 cannot run in shard_map: {PROBLEM}. Install a version of JAX that is tested.")
    return frozenset(axes or ())


def vary_alike(operands: Tree, others: Any = ()) -> Tree:
    """Make operands vary along the same mesh axes.

    The axes along which an operand, or one of `others`, varies.

    Args:
        operands: Tree of arrays.
        others: Tree of arrays that the result depends on as well.
    """
    axes = frozenset().union(*(varying_axes(leaf) for leaf in jax.tree.leaves((operands, others))))

    def convert(x: Any) -> Any:
        missing = tuple(sorted(axes - varying_axes(x)))
        return lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(convert, operands)


# ---------------------------------------------------------------- bits


def to_bits(x: jax.Array) -> jax.Array:
    """Return float32 bits as int32."""
    return lax.bitcast_convert_type(x, jnp.int32)


def from_bits(bits: jax.Array) -> jax.Array:
    """Return the float32 whose bits are the int32 `bits`."""
    return lax.bitcast_convert_type(bits, jnp.float32)


def float_key(x: jax.Array) -> jax.Array:
    """Return float32 bits without sign, an order-preserving int32 key."""
    return lax.bitwise_and(to_bits(x), np.int32(KEY_MASK))


def flipped(bits: jax.Array) -> jax.Array:
    """Return int32 with the order of negative numbers reversed.

    Of negative floats the greater has smaller bits.
    """
    return lax.bitwise_xor(bits, lax.bitwise_and(lax.shift_right_arithmetic(bits, np.int32(31)), np.int32(KEY_MASK)))


# ---------------------------------------------------------------- quotients and multiplications


def divide_nearest(numerator: float | jax.Array, denominator: jax.Array) -> jax.Array:
    """Return RN32(numerator / denominator); quotients below 2^-126 may come out as zero.

    Args:
        numerator: float32, not negative: a number, or an array of the denominator's shape.
        denominator: float32, any shape, not negative; zero, infinity and NaN give IEEE division's results. Subnormals
            count as zero.
    """
    return _quotient(jnp.broadcast_to(jnp.asarray(numerator, jnp.float32), denominator.shape), denominator)


# A separate function in the traced program, so that divisions of equal shapes are traced and lowered once.
@jax.jit
def _quotient(numerator: jax.Array, denominator: jax.Array) -> jax.Array:
    # Behind a barrier, and of equal shapes: XLA turns a division by a constant or a broadcast into a multiplication by
    # the reciprocal, which rounds twice. Both are, or loops would hoist expressions of a constant numerator.
    return lax.platform_dependent(*lax.optimization_barrier((numerator, denominator)), cpu=lax.div, default=_mended)


def divide(numerator: float, denominator: jax.Array) -> jax.Array:
    """Return RN32(numerator / denominator), exact where the denominator is subnormal or zero.

    Args:
        numerator: Positive normal float32 of at least 2^-20, so that these quotients are huge.
        denominator: float32, any shape, not negative.

    Returns:
        float32; quotients below 2^-126 may come out as zero.
    """
    lifted, small = _lifted(denominator)
    quotient = divide_nearest(numerator, lifted)
    return jnp.where(small, quotient * jnp.float32(2.0**LIFT), quotient)


def _lifted(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return `x` without subnormals: 2^64 times them, and the mask.

    Zero counts as subnormal.
    """
    key, sign = float_key(x), to_bits(x) & jnp.int32(SIGN_MASK)
    small = key < MIN_NORMAL_KEY
    # The bits of a subnormal, read as an integer, count its steps of 2^-149: below 2^23, the conversion is exact.
    integer = key.astype(jnp.float32) * jnp.float32(2.0 ** (LIFT - 149))
    return jnp.where(small, from_bits(to_bits(integer) | sign), x), small


# Primitives from here on, where `jnp` would trace a function for each operator: every program that casts traces this.
@jax.named_scope("divide_nearest")
def _mended(numerator: jax.Array, denominator: jax.Array) -> jax.Array:
    """Return float32 quotients from the estimated significands' quotients.

    Both arrays have one shape.
    """
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
    """Return RN32(numerator / denominator) from a near estimate.

    The estimate is at most two units in the last place off.

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


def product_into(x: jax.Array, scale: jax.Array) -> jax.Array:
    """Return RN32(x * scale), exact for results from 2^-100 on.

    For any operands.

    Smaller results may be zero with the right sign: they round to zero in every FP8 format. A
    subnormal x matters where scale > 2^100, a subnormal scale where x is huge.

    Args:
        x: float32, any shape.
        scale: float32, of the same number of dimensions, broadcastable to `x`.
    """
    # The barrier makes XLA compute these once per scale instead of once per element.
    (x, x_small), (scale, scale_small) = _lifted(x), lax.optimization_barrier(_lifted(scale))
    return x * scale * jnp.where(x_small | scale_small, jnp.float32(2.0**-LIFT), jnp.float32(1))


def product_back(values: jax.Array, scale_inv: jax.Array) -> jax.Array:
    """Return RN32(values * scale_inv) exactly, subnormal results included.

    Args:
        values: float32 values of an FP8 format, any shape: at most four significant bits, zero or >= 2^-17.
        scale_inv: float32, of the same number of dimensions, broadcastable to `values`; subnormals included.
    """
    lifted, small = _lifted(scale_inv)
    # once per scale, as in `product_into`
    scale, lowered = lax.optimization_barrier((lifted, jnp.where(small, jnp.int32(LIFT), jnp.int32(0))))
    above, below = float_key(values), float_key(scale)
    # The leading bit and the three mantissa bits that E4M3 has at most, times 24 bits: a whole number below 2^28, which
    # is `product * 2^exponent` in units of 2^-149, the smallest subnormal.
    product = (_with_mantissa(HIDDEN_BIT, above) >> 20) * _with_mantissa(HIDDEN_BIT, below)
    exponent = (above >> 23) + (below >> 23) - lowered - jnp.int32(131)
    rounded = to_bits(product.astype(jnp.float32))
    field = (rounded >> 23) + exponent - jnp.int32(149)
    # Subnormal results are such units, rounded to nearest even. Limits of the shift: 30 gives zero as every larger one
    # would; where it would be below 1 the result is normal.
    shift = jnp.clip(-exponent, 1, 30)
    odd = (product >> shift) & jnp.int32(1)
    units = (product + (lax.shift_left(jnp.int32(1), shift - 1) - 1) + odd) >> shift
    bits = jnp.where(field > 0, (field << 23) | (rounded & jnp.int32(MANTISSA_MASK)), units)
    sign = (to_bits(values) ^ to_bits(scale)) & jnp.int32(SIGN_MASK)
    # zeros, infinities, NaN and overflow as IEEE has them
    usual = (above > 0) & (above < INF_KEY) & (below > 0) & (below < INF_KEY) & (field < 255)
    return jnp.where(usual, from_bits(bits | sign), values * scale)
