"""Checks of the arrays that the JAX functions accept, and the bits of float32 values as integers.

Integers matter here more than elsewhere: XLA on CPUs flushes float32 subnormals to zero in every float
operation, so whatever must stay exact is compared, selected and assembled on bits.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from fp8_common._reference.scaling import INPUT_DTYPES, KEY_MASK
from fp8_common.errors import Fp8Error
from fp8_common.formats import Format, get_format

SIGN_MASK = -(2**31)
"""The sign of float32 bits, as an int32."""
EXPONENT_MASK = 0x7F800000
MANTISSA_MASK = 0x007FFFFF
HIDDEN_BIT = 0x00800000
NAN_KEY = 0x7FC00000
"""Put where a NaN belongs as bits, so that `jax_debug_nans` stops at none that were not there."""


def as_input(x: ArrayLike, what: str = "x") -> jax.Array:
    """Return `x` as an array of its own dtype.

    Args:
        x: Array (NumPy, JAX or traced) of float16, bfloat16 or float32.
        what: The name of the argument in errors.

    Raises:
        Fp8Error: `x` has another dtype; Python numbers and lists of them count as float64.
    """
    dtype = _dtype(x)
    if dtype not in INPUT_DTYPES:
        raise Fp8Error(f"{what} must be float16, bfloat16 or float32, got {dtype}. Convert it to float32 first.")
    return jnp.asarray(x, dtype)


def as_float32(x: ArrayLike, what: str = "x") -> jax.Array:
    """Return `x` as a float32 array, exactly; arguments and errors are those of `as_input`."""
    return as_input(x, what).astype(jnp.float32)


def as_codes(codes: ArrayLike, fmt: str | Format) -> jax.Array:
    """Return `codes` as uint8, bitcasting arrays of the format's own dtype.

    Raises:
        Fp8Error: The dtype is neither uint8 nor the format's own.
    """
    dtype, own = _dtype(codes), get_format(fmt).numpy_dtype
    if dtype not in (np.dtype(np.uint8), own):
        raise Fp8Error(f"FP8 codes must be uint8 or {own.name}, got {dtype}.")
    array = jnp.asarray(codes, dtype)
    return array if dtype == np.uint8 else lax.bitcast_convert_type(array, jnp.uint8)


def as_native(codes: jax.Array, fmt: Format) -> jax.Array:
    """Return uint8 codes as an array of the format's own dtype, bit for bit."""
    return lax.bitcast_convert_type(codes, fmt.numpy_dtype)


def broadcast_scale(scale: ArrayLike, shape: tuple[int, ...], what: str = "scale") -> jax.Array:
    """Return `scale` as float32 with as many dimensions as `shape`, each of length 1 or that of `shape`.

    It is not broadcast further, so that work on scales stays as small as the scales.

    Raises:
        Fp8Error: Unsupported dtype, or `scale` does not broadcast to `shape`.
    """
    array = as_float32(scale, what)
    missing = len(shape) - array.ndim
    fits = missing >= 0 and all(n in (1, m) for n, m in zip(array.shape, shape[missing:], strict=True))
    if not fits:
        raise Fp8Error(f"{what} of shape {array.shape} does not broadcast to {tuple(shape)}.")
    return array.reshape((1,) * missing + array.shape)


def to_bits(x: jax.Array) -> jax.Array:
    """Return float32 bits as int32."""
    return lax.bitcast_convert_type(x, jnp.int32)


def from_bits(bits: jax.Array) -> jax.Array:
    """Return the float32 whose bits are the int32 `bits`."""
    return lax.bitcast_convert_type(bits, jnp.float32)


def float_key(x: jax.Array) -> jax.Array:
    """Return float32 bits with the sign cleared, as int32: an order-preserving key of |x|."""
    return lax.bitwise_and(to_bits(x), np.int32(KEY_MASK))


def _dtype(x: ArrayLike) -> np.dtype:
    # Not the dtype that JAX would give it: jnp.asarray makes float32 of a Python number, and its rounding would pass
    # unseen.
    return x.dtype if hasattr(x, "dtype") else np.asarray(x).dtype
