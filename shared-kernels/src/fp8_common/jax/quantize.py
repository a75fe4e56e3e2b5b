"""Decides how JAX arrays become FP8 data plus scales, at every granularity, equal to `fp8_common.quantize`.

Data has the format's native dtype (`jnp.float8_e4m3fn`, ...). Every function here has zero gradients; for training
through a cast use `fp8_common.jax.fake_quantize`. All work under jit, vmap, grad and shard_map; formats, policies,
blocks, modes and dtypes are static.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from fp8_common.amax import INPUT_DTYPES
from fp8_common.blocks import Block, check_block
from fp8_common.errors import Fp8Error
from fp8_common.formats import Format, get_data_format
from fp8_common.jax.amax import amax
from fp8_common.jax.arrays import (
    SIGN_MASK,
    as_codes,
    as_float32,
    as_native,
    broadcast_scale,
    float_key,
    from_bits,
    to_bits,
)
from fp8_common.jax.blocks import block_amax, expand_blocks
from fp8_common.jax.e8m0 import amax_to_e8m0, e8m0_to_scale, e8m0_to_scale_inv
from fp8_common.jax.products import product_back, product_into
from fp8_common.jax.rounding import check_random_bits, decode_codes, round_to_codes, round_to_codes_at_random
from fp8_common.jax.scaling import amax_to_scale, reciprocal
from fp8_common.policy import CANONICAL, MxMode, ScalePolicy
from fp8_common.quantize import MX_BLOCK, Quantized


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
    value = as_float32(x)
    return _quantize(value, broadcast_scale(scale, value.shape), fmt=get_data_format(fmt))


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
    scale_inv = reciprocal(broadcast_scale(scale, codes.shape))
    return _dequantize(codes, scale_inv, fmt=fmt, dtype=_output_dtype(dtype))


def quantize_rowwise(
    x: ArrayLike, fmt: str | Format, axis: int = -1, policy: ScalePolicy = CANONICAL
) -> Quantized:
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
    scale = amax_to_scale(amax(x, axis=axis, keepdims=True), fmt, policy)
    return Quantized(quantize(x, scale, fmt), scale)


def quantize_blockwise(
    x: ArrayLike, fmt: str | Format, block: Block = (1, 128), policy: ScalePolicy = CANONICAL
) -> Quantized:
    """Quantize with one scale for each (rows, columns) block of the last two dimensions.

    Args:
        x: float16, bfloat16 or float32 [..., M, N]; blocks at the edges may be partial.
        fmt: The FP8 format.
        block: (1, 128) for activations and gradients, (128, 128) for weights.
        policy: The scale rule.

    Returns:
        float8 data [..., M, N]; float32 scales [..., ceil(M / rows), ceil(N / columns)].

    Raises:
        Fp8Error: Unsupported dtype, format or block.
    """
    value = as_float32(x)
    scale = amax_to_scale(block_amax(value, check_block(block, value.ndim)), fmt, policy)
    return Quantized(quantize(value, expand_blocks(scale, block, value.shape), fmt), scale)


def dequantize_blockwise(
    q: ArrayLike, scale: ArrayLike, fmt: str | Format, block: Block = (1, 128), dtype: DTypeLike = jnp.float32
) -> jax.Array:
    """Undo `quantize_blockwise`: data [..., M, N] and scales [..., ceil(M / rows), ceil(N / columns)].

    Raises:
        Fp8Error: Unsupported dtype, format, block or shape of `scale`.
    """
    fmt = get_data_format(fmt)
    codes = as_codes(q, fmt)
    check_block(block, codes.ndim)
    wide = expand_blocks(reciprocal(scale), block, codes.shape)
    return _dequantize(codes, wide, fmt=fmt, dtype=_output_dtype(dtype))


def quantize_mx(x: ArrayLike, fmt: str | Format, mode: MxMode = "rceil") -> Quantized:
    """Quantize to OCP MX: one E8M0 scale for 32 consecutive values of the last dimension.

    Args:
        x: float16, bfloat16 or float32 [..., N]; the last block may be partial.
        fmt: The element format.
        mode: How the scale is rounded; see `amax_to_e8m0`.

    Returns:
        float8 data [..., N]; uint8 E8M0 codes [..., ceil(N / 32)] (2^(code-127) goes back from FP8; 255 marks a
        block with an infinity or a NaN, all of whose data is NaN).

    Raises:
        Fp8Error: Unsupported dtype, format or mode.
    """
    value = as_float32(x)
    codes = amax_to_e8m0(block_amax(value, check_block(MX_BLOCK, value.ndim)), fmt, mode)
    scale = expand_blocks(e8m0_to_scale(codes), MX_BLOCK, value.shape)
    return Quantized(quantize(value, scale, fmt), codes)


def dequantize_mx(q: ArrayLike, codes: ArrayLike, fmt: str | Format, dtype: DTypeLike = jnp.float32) -> jax.Array:
    """Undo `quantize_mx`: data [..., N] and E8M0 codes [..., ceil(N / 32)]; exact in float32, subnormals included.

    Raises:
        Fp8Error: Unsupported dtype or format, or the shapes do not fit.
    """
    fmt = get_data_format(fmt)
    data = as_codes(q, fmt)
    wide = expand_blocks(e8m0_to_scale_inv(codes), MX_BLOCK, data.shape)
    return _dequantize(data, wide, fmt=fmt, dtype=_output_dtype(dtype))


@partial(jax.jit, static_argnames="fmt", inline=True)
def _quantize(x: jax.Array, scale: jax.Array, *, fmt: Format) -> jax.Array:
    scaled = product_into(lax.stop_gradient(x), lax.stop_gradient(scale))
    return as_native(round_to_codes(scaled, fmt), fmt)


@partial(jax.jit, static_argnames="fmt", inline=True)
def _quantize_stochastic(x: jax.Array, scale: jax.Array, bits: jax.Array, *, fmt: Format) -> jax.Array:
    scaled = product_into(lax.stop_gradient(x), lax.stop_gradient(scale))
    return as_native(round_to_codes_at_random(scaled, bits, fmt), fmt)


@partial(jax.jit, static_argnames=("fmt", "dtype"), inline=True)
def _dequantize(codes: jax.Array, scale_inv: jax.Array, *, fmt: Format, dtype: np.dtype) -> jax.Array:
    value = product_back(decode_codes(codes, fmt), lax.stop_gradient(scale_inv))
    return _to_bfloat16(value) if dtype == jnp.bfloat16 else value.astype(dtype)


def _to_bfloat16(x: jax.Array) -> jax.Array:
    """Round to nearest even on bits: the hardware instruction that XLA may use flushes subnormals."""
    key = float_key(x)
    rounded = key + jnp.int32(0x7FFF) + ((key >> 16) & jnp.int32(1))
    quiet = jnp.where(key > jnp.int32(0x7F800000), key, rounded)
    bits = lax.shift_right_logical(quiet | (to_bits(x) & jnp.int32(SIGN_MASK)), jnp.int32(16))
    return lax.bitcast_convert_type(bits.astype(jnp.uint16), jnp.bfloat16)


def _output_dtype(dtype: DTypeLike) -> np.dtype:
    """Return `dtype` as a NumPy dtype.

    Raises:
        Fp8Error: It is not float32, float16 or bfloat16.
    """
    found = np.dtype(dtype)
    if found not in INPUT_DTYPES:
        raise Fp8Error(f"dtype must be float16, bfloat16 or float32, got {found}.")
    return found
