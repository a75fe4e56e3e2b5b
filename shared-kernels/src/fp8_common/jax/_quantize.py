"""The references of the casts to FP8 and back, with scales for whole arrays or rows, in jnp code.

Data has the format's native dtype (`jnp.float8_e4m3fn`, ...). Every function here has zero gradients; for
training through a cast use `fp8_common.jax.fake_quantize`. Formats, policies and dtypes are static under jit.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from fp8_common._amax import INF_KEY, INPUT_DTYPES
from fp8_common._errors import Fp8Error
from fp8_common._formats import Format, get_data_format
from fp8_common._policy import CANONICAL, ScalePolicy
from fp8_common._quantize import Quantized
from fp8_common.jax._amax import amax
from fp8_common.jax._arrays import as_codes, as_float32, as_native, broadcast_scale, float_key
from fp8_common.jax._products import product_back, product_into
from fp8_common.jax._rounding import (
    check_random_bits,
    decode_codes,
    nan_where_infinite,
    round_to_codes,
    round_to_codes_at_random,
)
from fp8_common.jax._scaling import amax_to_scale, reciprocal


def quantize(x: ArrayLike, scale: ArrayLike, fmt: str | Format) -> jax.Array:
    """Return `x * scale` in the dtype of `fmt`; arguments and errors are those of `fp8_common.jax.quantize`."""
    value = as_float32(x)
    return _quantize(value, broadcast_scale(scale, value.shape), fmt=get_data_format(fmt))


def quantize_to_codes(x: jax.Array, scale: jax.Array, fmt: Format) -> jax.Array:
    """Return the uint8 codes of `x * scale` for float32 scales in [2^-126, 2^100], as canonical policies make them.

    In that range it does not matter that XLA flushes subnormals: they round to zero in every format. So this is a
    plain product, with a third of the operations of `quantize`.
    """
    value = x.astype(jnp.float32)
    return round_to_codes(value * scale, fmt, lax.ge(float_key(value), np.int32(INF_KEY)))


def quantize_stochastic(x: ArrayLike, scale: ArrayLike, fmt: str | Format, random_bits: ArrayLike) -> jax.Array:
    """Like `quantize`, rounding up or down at random; `random_bits` is uint32 of the shape of `x`.

    Raises:
        Fp8Error: Unsupported dtype, format or shape.
    """
    value = as_float32(x)
    bits = check_random_bits(random_bits, value.shape)
    return _quantize_stochastic(value, broadcast_scale(scale, value.shape), bits, fmt=get_data_format(fmt))


def dequantize(q: ArrayLike, scale: ArrayLike, fmt: str | Format, dtype: DTypeLike = jnp.float32) -> jax.Array:
    """Return `q * RN32(1 / scale)`, computed in float32 and rounded to `dtype`.

    Args:
        q: The native dtype of `fmt`, or uint8 codes; any shape.
        scale: float32 scale into FP8, broadcastable to `q`.
        fmt: The FP8 format of `q`; static under jit.
        dtype: float32, float16 or bfloat16; static under jit.

    Raises:
        Fp8Error: Unsupported dtype or format, or `scale` does not broadcast.
    """
    fmt = get_data_format(fmt)
    codes = as_codes(q, fmt)
    return multiply_back(codes, reciprocal(broadcast_scale(scale, codes.shape)), fmt, dtype)


def quantize_rowwise(x: ArrayLike, fmt: str | Format, axis: int = -1, policy: ScalePolicy = CANONICAL) -> Quantized:
    """Quantize slices along `axis`; arguments and errors are those of `fp8_common.jax.quantize_rowwise`."""
    scale = amax_to_scale(amax(x, axis=axis, keepdims=True), fmt, policy)
    return Quantized(quantize(x, scale, fmt), scale)


def multiply_back(codes: jax.Array, scale_inv: jax.Array, fmt: Format, dtype: DTypeLike) -> jax.Array:
    """Return the values of uint8 `codes` times float32 `scale_inv` (same number of dimensions), in `dtype`.

    Raises:
        Fp8Error: `dtype` is not float32, float16 or bfloat16.
    """
    found = np.dtype(dtype)
    if found not in INPUT_DTYPES:
        raise Fp8Error(f"dtype must be float16, bfloat16 or float32, got {found}.")
    return _multiply_back(codes, scale_inv, fmt=fmt, dtype=found)


# Jitted, so that an eager call is compiled as a whole; inlined where a caller is traced, which then shows no call.
@partial(jax.jit, static_argnames="fmt", inline=True)
def _quantize(x: jax.Array, scale: jax.Array, *, fmt: Format) -> jax.Array:
    scaled = product_into(nan_where_infinite(lax.stop_gradient(x)), lax.stop_gradient(scale))
    return as_native(round_to_codes(scaled, fmt), fmt)


@partial(jax.jit, static_argnames="fmt", inline=True)
def _quantize_stochastic(x: jax.Array, scale: jax.Array, bits: jax.Array, *, fmt: Format) -> jax.Array:
    scaled = product_into(nan_where_infinite(lax.stop_gradient(x)), lax.stop_gradient(scale))
    return as_native(round_to_codes_at_random(scaled, bits, fmt), fmt)


@partial(jax.jit, static_argnames=("fmt", "dtype"), inline=True)
def _multiply_back(codes: jax.Array, scale_inv: jax.Array, *, fmt: Format, dtype: np.dtype) -> jax.Array:
    return product_back(decode_codes(codes, fmt), lax.stop_gradient(scale_inv)).astype(dtype)
