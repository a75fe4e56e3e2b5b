"""Decides how JAX arrays become FP8 data with block scales: 1x128, 128x128 and the 1x32 of OCP MX."""

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike

from fp8_common._blocks import Block, check_block
from fp8_common._formats import E8M0, Format, get_data_format
from fp8_common._policy import CANONICAL, MxMode, ScalePolicy
from fp8_common._quantize import MX_BLOCK, Quantized
from fp8_common.jax._arrays import as_codes, as_float32, as_native
from fp8_common.jax._blocks import block_amax, expand_blocks
from fp8_common.jax._e8m0 import amax_to_e8m0, e8m0_to_scale, e8m0_to_scale_inv
from fp8_common.jax._quantize import multiply_back, quantize
from fp8_common.jax._scaling import amax_to_scale, reciprocal
from fp8_common.jax._triton_bridge import selects_kernels

WITH_KERNELS = ((1, 128), (128, 128))


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
    if check_block(block, value.ndim) in WITH_KERNELS and selects_kernels():
        from fp8_common.jax import _kernels as kernels  # made of this module's functions

        return kernels.quantize_blockwise(jnp.asarray(x), fmt, block, policy)
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
    return multiply_back(codes, expand_blocks(reciprocal(scale), block, codes.shape), fmt, dtype)


def quantize_mx(x: ArrayLike, fmt: str | Format, mode: MxMode = "rceil") -> Quantized:
    """Quantize to OCP MX: one E8M0 scale for 32 consecutive values of the last dimension.

    Args:
        x: float16, bfloat16 or float32 [..., N]; the last block may be partial.
        fmt: The element format.
        mode: How the scale is rounded; see `amax_to_e8m0`.

    Returns:
        float8 data [..., N]; float8_e8m0fnu scales [..., ceil(N / 32)], which go back from FP8; a NaN scale
        marks a block with an infinity or a NaN, all of whose data is NaN.

    Raises:
        Fp8Error: Unsupported dtype, format or mode.
    """
    value = as_float32(x)
    if selects_kernels():
        from fp8_common.jax import _kernels as kernels

        return kernels.quantize_mx(jnp.asarray(x), fmt, mode)
    codes = amax_to_e8m0(block_amax(value, check_block(MX_BLOCK, value.ndim)), fmt, mode)
    scale = expand_blocks(e8m0_to_scale(codes), MX_BLOCK, value.shape)
    return Quantized(quantize(value, scale, fmt), as_native(codes, E8M0))


def dequantize_mx(q: ArrayLike, codes: ArrayLike, fmt: str | Format, dtype: DTypeLike = jnp.float32) -> jax.Array:
    """Undo `quantize_mx`: data [..., N] and scales [..., ceil(N / 32)], either as native dtype or as codes.

    Exact in float32, subnormal results included.

    Raises:
        Fp8Error: Unsupported dtype or format, or the shapes do not fit.
    """
    fmt = get_data_format(fmt)
    data = as_codes(q, fmt)
    return multiply_back(data, expand_blocks(e8m0_to_scale_inv(codes), MX_BLOCK, data.shape), fmt, dtype)
