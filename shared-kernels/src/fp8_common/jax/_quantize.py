"""Decides how JAX arrays become FP8 data and floats again, with scales for whole arrays or rows.

Data has the format's native dtype (`jnp.float8_e4m3fn`, ...). Every function here has zero gradients; for
training through a cast use `fp8_common.jax.fake_quantize`. Formats, policies and dtypes are static under jit.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from fp8_common._amax import INPUT_DTYPES
from fp8_common._errors import Fp8Error
from fp8_common._formats import Format, get_data_format
from fp8_common._policy import CANONICAL, ScalePolicy
from fp8_common._quantize import Quantized
from fp8_common.jax._amax import amax
from fp8_common.jax._arrays import as_codes, as_float32, as_native, broadcast_scale
from fp8_common.jax._products import product_back, product_into
from fp8_common.jax._rounding import check_random_bits, decode_codes, round_to_codes, round_to_codes_at_random
from fp8_common.jax._scaling import amax_to_scale, reciprocal
from fp8_common.jax._triton_bridge import references_only, selects_kernels


def quantize(x: ArrayLike, scale: ArrayLike, fmt: str | Format) -> jax.Array:
    """Return `x * scale` in the native dtype of `fmt`, saturating; NaN stays NaN.

    Args:
        x: float16, bfloat16 or float32, any shape.
        scale: float32, broadcastable to `x`.
        fmt: The FP8 format; static under jit.

    Returns:
        float8 array of the shape of `x`.

    Raises:
        Fp8Error: Unsupported dtype or format, or `scale` does not broadcast.
    """
    value, form = as_float32(x), get_data_format(fmt)
    scales = broadcast_scale(scale, value.shape)
    if scales.size == 1 and value.ndim and selects_kernels():
        from fp8_common.jax import _kernels as kernels  # made of this module's functions

        return kernels.quantize(jnp.asarray(x), scales, form)
    return _quantize(value, scales, fmt=form)


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
    """Quantize with one scale for each slice along `axis`.

    Args:
        x: float16, bfloat16 or float32, any shape of at least one dimension.
        fmt: The FP8 format.
        axis: The axis that shares a scale: -1 gives a scale per row, 0 a scale per column of a matrix.
        policy: The scale rule.

    Returns:
        float8 data of the shape of `x`; float32 scales of that shape with `axis` of length 1.

    Raises:
        Fp8Error: Unsupported dtype or format.
    """
    if axis % max(1, np.ndim(x)) == np.ndim(x) - 1 and selects_kernels():
        from fp8_common.jax import _kernels as kernels

        as_float32(x)
        return kernels.quantize_rowwise(jnp.asarray(x), fmt, policy)
    with references_only():
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


@partial(jax.jit, static_argnames="fmt", inline=True)
def _quantize(x: jax.Array, scale: jax.Array, *, fmt: Format) -> jax.Array:
    scaled = product_into(lax.stop_gradient(x), lax.stop_gradient(scale))
    return as_native(round_to_codes(scaled, fmt), fmt)


@partial(jax.jit, static_argnames="fmt", inline=True)
def _quantize_stochastic(x: jax.Array, scale: jax.Array, bits: jax.Array, *, fmt: Format) -> jax.Array:
    scaled = product_into(lax.stop_gradient(x), lax.stop_gradient(scale))
    return as_native(round_to_codes_at_random(scaled, bits, fmt), fmt)


@partial(jax.jit, static_argnames=("fmt", "dtype"), inline=True)
def _multiply_back(codes: jax.Array, scale_inv: jax.Array, *, fmt: Format, dtype: np.dtype) -> jax.Array:
    return product_back(decode_codes(codes, fmt), lax.stop_gradient(scale_inv)).astype(dtype)
