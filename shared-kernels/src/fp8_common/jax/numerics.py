"""Checks of arrays, float32 bits as integers, and exact arithmetic.

XLA on CPUs treats subnormal operands of float operations as zero, and replaces subnormal results by zero. Exact numbers
are therefore compared, selected and assembled on bits. A subnormal is an integer times 2^-149: an operand is converted
to that integer, with the power of two moved to the scale, and a result is assembled by integer rounding.

XLA on GPUs divides by `div.full.f32`, whose error is up to two units in the last place, and whose result is zero for
denominators above 2^126. The quotient of the significands is therefore an estimate, corrected by its integer remainder.
"""

from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import ShapedArray
from jax.sharding import get_abstract_mesh
from jax.typing import ArrayLike

from fp8_common._reference.scaling import INF_KEY, INPUT_DTYPES, KEY_MASK, MANTISSA_MASK, MIN_NORMAL_KEY
from fp8_common.errors import Fp8Error, Fp8UnsupportedError
from fp8_common.formats import Format, get_format
from fp8_common.jax.compat import PROBLEM

Tree = TypeVar("Tree")

SIGN_MASK = -(2**31)
"""Sign of float32 bits, as an int32."""
HIDDEN_BIT = 0x00800000
NAN_KEY = 0x7FC00000
"""Bits of NaN. NaN results are selected as bits, so that `jax_debug_nans` does not stop at intermediate NaN."""
ONE_BITS = 0x3F800000
"""Bits of 1.0; with another mantissa, bits of a number in [1, 2)."""
LIFT = 64
"""Exponent of the power of two that multiplies subnormal operands; results are multiplied by its inverse."""


# ---------------------------------------------------------------- checks


def as_input(x: ArrayLike, what: str = "x") -> jax.Array:
    """Return `x` as an array in its dtype.

    Args:
        x: Array (NumPy, JAX or traced) of float16, bfloat16 or float32.
        what: Name of the argument in errors.

    Raises:
        Fp8Error: If the dtype is not supported. Python numbers, and lists of them, count as float64.
    """
    dtype = _dtype(x)
    if dtype not in INPUT_DTYPES:
        raise Fp8Error(f"{what} must be float16, bfloat16 or float32, got {dtype}. Convert it to float32 first.")
    return jnp.asarray(x, dtype)


def as_float32(x: ArrayLike, what: str = "x") -> jax.Array:
    """Convert an array to float32, exactly.

    Arguments and errors are those of `as_input`.
    """
    return as_input(x, what).astype(jnp.float32)


def to_uint8_codes(codes: ArrayLike, fmt: str | Format) -> jax.Array:
    """Return codes as uint8; arrays of the format's own dtype are bitcast.

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
    """Return a scale as float32, with leading dimensions of length 1.

    It then has as many dimensions as `shape`, each of length 1 or that of `shape`. It is not broadcast further, so that
    operations on scales are as small as the scales.

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
    # Not the dtype of `jnp.asarray`, which silently rounds Python numbers to float32.
    return x.dtype if hasattr(x, "dtype") else np.asarray(x).dtype


# ---------------------------------------------------------------- axes of shard_map


def varying_axes(x: Any) -> frozenset[str]:
    """Return the mesh axes along which an array or abstract value varies.

    The result is empty outside of `shard_map(..., check_vma=True)`.

    Raises:
        Fp8UnsupportedError: If called inside of a `shard_map` with a JAX whose types lack these axes.
    """
    aval = x if isinstance(x, ShapedArray) else jax.typeof(x)
    # Newer versions of JAX keep these axes in the attribute `mat` ("manual axis type"), older ones in `vma`.
    if (manual := getattr(aval, "mat", None)) is not None:
        return frozenset(manual.varying)
    # There is no default: if the attribute were renamed, the axes would be lost, and an amax be of one device only.
    if (axes := getattr(aval, "vma", None)) is None and get_abstract_mesh().manual_axes:
        raise Fp8UnsupportedError(f"FP8 cannot run in shard_map: {PROBLEM}. Install a tested version of JAX.")
    return frozenset(axes or ())


def vary_alike(operands: Tree, others: Any = ()) -> Tree:
    """Make operands vary along the same mesh axes.

    These are all axes along which an array of `operands` or `others` varies.

    Args:
        operands: Tree of arrays.
        others: Tree of further arrays on which the result depends.

    Returns:
        `operands`, converted.
    """
    axes = frozenset().union(*(varying_axes(leaf) for leaf in jax.tree.leaves((operands, others))))

    def convert(x: Any) -> Any:
        missing = tuple(sorted(axes - varying_axes(x)))
        return lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(convert, operands)


# ---------------------------------------------------------------- bits


def to_bits(x: jax.Array) -> jax.Array:
    """Return the int32 bits of a float32 array."""
    return lax.bitcast_convert_type(x, jnp.int32)


def from_bits(bits: jax.Array) -> jax.Array:
    """Return the float32 array with the given int32 bits."""
    return lax.bitcast_convert_type(bits, jnp.float32)


def float_key(x: jax.Array) -> jax.Array:
    """Return the bits of |x|, an order-preserving int32 key."""
    return lax.bitwise_and(to_bits(x), np.int32(KEY_MASK))


def flipped(bits: jax.Array) -> jax.Array:
    """Return int32 keys in the order of floats, from their bits.

    The order of negative numbers is reversed, because greater negative floats have smaller bits. The function is its
    own inverse.
    """
    return lax.bitwise_xor(bits, lax.bitwise_and(lax.shift_right_arithmetic(bits, np.int32(31)), np.int32(KEY_MASK)))


# ---------------------------------------------------------------- quotients and multiplications


def divide_nearest(numerator: float | jax.Array, denominator: jax.Array) -> jax.Array:
    """Return RN32(numerator / denominator) for normal quotients.

    Quotients below 2^-126 may become zero.

    Args:
        numerator: Non-negative float32: a number, or an array of the denominator's shape.
        denominator: Non-negative float32, any shape. Zero, infinity and NaN give the results of IEEE division.
            Subnormals count as zero.
    """
    return _quotient(jnp.broadcast_to(jnp.asarray(numerator, jnp.float32), denominator.shape), denominator)


# A separate function in the traced program, so that divisions of equal shapes are traced and lowered once.
@jax.jit
def _quotient(numerator: jax.Array, denominator: jax.Array) -> jax.Array:
    # The operands have equal shapes and pass a barrier, because XLA replaces a division by a constant or a broadcast by
    # a multiplication with the reciprocal, which rounds twice. The numerator passes the barrier, too, because loops
    # hoist expressions of a constant.
    operands = lax.optimization_barrier((numerator, denominator))
    return lax.platform_dependent(*operands, cpu=lax.div, default=_corrected_quotient)


def divide(numerator: float, denominator: jax.Array) -> jax.Array:
    """Return RN32(numerator / denominator), also for subnormal denominators.

    Args:
        numerator: Normal float32 of at least 2^-20, so that quotients of subnormals are huge.
        denominator: Non-negative float32, any shape, including zero.

    Returns:
        float32. Quotients below 2^-126 may become zero.
    """
    lifted, small = _lifted(denominator)
    quotient = divide_nearest(numerator, lifted)
    return jnp.where(small, quotient * jnp.float32(2.0**LIFT), quotient)


def _lifted(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return `x` with subnormals multiplied by 2^64, and their mask.

    Zero counts as subnormal.
    """
    key, sign = float_key(x), to_bits(x) & jnp.int32(SIGN_MASK)
    small = key < MIN_NORMAL_KEY
    # The bits of a subnormal are its number of steps of 2^-149, which is below 2^23, so the conversion is exact.
    integer = key.astype(jnp.float32) * jnp.float32(2.0 ** (LIFT - 149))
    return jnp.where(small, from_bits(to_bits(integer) | sign), x), small


# From here on, `lax` primitives are used, because `jnp` traces a function for each operator, and each program that
# casts traces this code.
@jax.named_scope("divide_nearest")
def _corrected_quotient(numerator: jax.Array, denominator: jax.Array) -> jax.Array:
    """Return exact float32 quotients from estimated quotients of significands.

    Both arrays have the same shape.
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
    """Return RN32(numerator / denominator) from an estimate.

    The remainder is computed modulo 2^32. This suffices, because it is smaller than three denominators. There are no
    ties.

    Args:
        estimate: float32, at most two units in the last place from the quotient.
        numerator: float32 in [1, 2), of the same shape.
        denominator: float32 in [1, 2), of the same shape.
    """
    dividend, divisor = (_with_mantissa(HIDDEN_BIT, float_key(x)) for x in (numerator, denominator))
    halved = _as_int(lax.lt(dividend, divisor))  # the quotient is in [1/2, 1), otherwise in [1, 2)
    lowest = lax.sub(np.int32(ONE_BITS), lax.shift_left(halved, np.int32(23)))
    # An estimate outside of the interval has another unit in the last place.
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
    """Return RN32(x * scale) for any operands, exact from 2^-100 on.

    Smaller results may become zero with the right sign; they round to zero in all FP8 formats. Subnormal x matter if
    scale > 2^100, and subnormal scales if x is huge.

    Args:
        x: float32, any shape.
        scale: float32, of the same number of dimensions, broadcastable to `x`.
    """
    # With the barrier, XLA computes these once per scale instead of once per element.
    (x, x_small), (scale, scale_small) = _lifted(x), lax.optimization_barrier(_lifted(scale))
    return x * scale * jnp.where(x_small | scale_small, jnp.float32(2.0**-LIFT), jnp.float32(1))


def product_back(values: jax.Array, scale_inv: jax.Array) -> jax.Array:
    """Return RN32(values * scale_inv), including subnormal operands and results.

    Args:
        values: Values of an FP8 data format in float32, any shape: at most four significant bits, and zero or
            magnitudes of at least 2^-17.
        scale_inv: float32, of the same number of dimensions, broadcastable to `values`.
    """
    lifted, small = _lifted(scale_inv)
    # The barrier is for the same reason as in `product_into`.
    scale, lowered = lax.optimization_barrier((lifted, jnp.where(small, jnp.int32(LIFT), jnp.int32(0))))
    above, below = float_key(values), float_key(scale)
    # The leading bit and at most three mantissa bits, times 24 bits, are an integer below 2^28. The result is
    # `product * 2^exponent` in units of 2^-149, the smallest subnormal.
    product = (_with_mantissa(HIDDEN_BIT, above) >> 20) * _with_mantissa(HIDDEN_BIT, below)
    exponent = (above >> 23) + (below >> 23) - lowered - jnp.int32(131)
    rounded = to_bits(product.astype(jnp.float32))
    field = (rounded >> 23) + exponent - jnp.int32(149)
    # Subnormal results are a number of these units, rounded to nearest even. A shift of 30 gives zero, like all larger
    # ones; if the shift is below 1, the result is normal.
    shift = jnp.clip(-exponent, 1, 30)
    odd = (product >> shift) & jnp.int32(1)
    units = (product + (lax.shift_left(jnp.int32(1), shift - 1) - 1) + odd) >> shift
    bits = jnp.where(field > 0, (field << 23) | (rounded & jnp.int32(MANTISSA_MASK)), units)
    sign = (to_bits(values) ^ to_bits(scale)) & jnp.int32(SIGN_MASK)
    # Zeros, infinities, NaN and overflow are as in IEEE 754.
    usual = (above > 0) & (above < INF_KEY) & (below > 0) & (below < INF_KEY) & (field < 255)
    return jnp.where(usual, from_bits(bits | sign), values * scale)
