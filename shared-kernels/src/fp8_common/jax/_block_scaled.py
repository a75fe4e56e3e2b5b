"""The references of the casts with block scales, in jnp code: 1x128, 128x128 and the 1x32 of OCP MX."""

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


def quantize_blockwise(
    x: ArrayLike, fmt: str | Format, block: Block = (1, 128), policy: ScalePolicy = CANONICAL
) -> Quantized:
    """Quantize blocks; arguments and errors are those of `fp8_common.jax.quantize_blockwise`."""
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
    return multiply_back(codes, expand_blocks(reciprocal(scale), block, codes.shape), fmt, dtype)


def quantize_mx(x: ArrayLike, fmt: str | Format, mode: MxMode = "rceil") -> Quantized:
    """Quantize to OCP MX; arguments and errors are those of `fp8_common.jax.quantize_mx`."""
    value = as_float32(x)
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
