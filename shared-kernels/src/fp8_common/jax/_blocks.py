"""Casts with block scales, including OCP MX: jnp code and kernels.

There are kernels for blocks of 1x128 and 128x128, and for the 1x32 blocks of OCP MX.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from fp8_common._reference.quantize import MX_BLOCK, Block, Quantized, block_grid, check_block
from fp8_common.errors import Fp8Error
from fp8_common.formats import E8M0, Format, get_data_format
from fp8_common.jax._kernels import KernelOp
from fp8_common.jax._scales import amax_to_e8m0, amax_to_scale, e8m0_to_scale, e8m0_to_scale_inv, reciprocal
from fp8_common.jax.casts import amax_by_jnp, multiply_back, quantize_by_jnp
from fp8_common.jax.numerics import as_float32, as_native, to_uint8_codes
from fp8_common.jax.slices import as_matrix
from fp8_common.policy import CANONICAL, MxMode, ScalePolicy


def quantize_blockwise(
    x: ArrayLike, fmt: str | Format, block: Block = (1, 128), policy: ScalePolicy = CANONICAL
) -> Quantized:
    """Quantize with one scale per block of the last two dimensions.

    Args:
        x: float16, bfloat16 or float32 [..., M, N]. Blocks at the edges may be partial.
        fmt: FP8 format.
        block: Block size (rows, columns): (1, 128) for activations and gradients, (128, 128) for weights.
        policy: Rule for the scales.

    Returns:
        float8 data [..., M, N], and float32 scales [..., ceil(M / rows), ceil(N / columns)].

    Raises:
        Fp8Error: If the dtype, format or block is not supported.
    """
    as_float32(x)
    return Quantized(*_BLOCKS(x, fmt=get_data_format(fmt), block=check_block(block, np.ndim(x)), policy=policy))


def quantize_mx(x: ArrayLike, fmt: str | Format, mode: MxMode = "rceil") -> Quantized:
    """Quantize to OCP MX.

    Each block of 32 consecutive values of the last dimension has one E8M0 scale.

    Args:
        x: float16, bfloat16 or float32 [..., N]. The last block may be partial.
        fmt: Format of the elements.
        mode: Rounding mode of the scale; see `amax_to_e8m0`.

    Returns:
        float8 data [..., N], and float8_e8m0fnu scales back from FP8 [..., ceil(N / 32)]. A NaN scale marks a block
        with an infinity or a NaN; all its values become NaN.

    Raises:
        Fp8Error: If the dtype, format or mode is not supported.
    """
    check_block(MX_BLOCK, as_float32(x).ndim)
    data, codes = _MX(x, fmt=get_data_format(fmt), mode=mode)
    return Quantized(data, as_native(codes, E8M0))


def dequantize_blockwise(
    q: ArrayLike, scale: ArrayLike, fmt: str | Format, block: Block = (1, 128), dtype: DTypeLike = jnp.float32
) -> jax.Array:
    """Dequantize the result of `quantize_blockwise`.

    Args:
        q: float8 data or uint8 codes [..., M, N].
        scale: float32 scales into FP8 [..., ceil(M / rows), ceil(N / columns)].
        fmt: FP8 format of `q`.
        block: Block size (rows, columns).
        dtype: float32, float16 or bfloat16.

    Returns:
        Values in `dtype`, [..., M, N].

    Raises:
        Fp8Error: If the dtype, format, block or shape of `scale` is not supported.
    """
    fmt = get_data_format(fmt)
    codes = to_uint8_codes(q, fmt)
    check_block(block, codes.ndim)
    return multiply_back(codes, _expanded(reciprocal(scale), block, codes.shape), fmt, dtype)


def dequantize_mx(q: ArrayLike, codes: ArrayLike, fmt: str | Format, dtype: DTypeLike = jnp.float32) -> jax.Array:
    """Dequantize the result of `quantize_mx`.

    The result is exact in float32, including subnormal values.

    Args:
        q: float8 data or uint8 codes [..., N].
        codes: E8M0 scales [..., ceil(N / 32)], float8_e8m0fnu or uint8.
        fmt: Format of the elements.
        dtype: float32, float16 or bfloat16.

    Returns:
        Values in `dtype`, [..., N].

    Raises:
        Fp8Error: If the dtype or format is not supported, or the shapes do not match.
    """
    fmt = get_data_format(fmt)
    data = to_uint8_codes(q, fmt)
    check_block(MX_BLOCK, data.ndim)
    return multiply_back(data, _expanded(e8m0_to_scale_inv(codes), MX_BLOCK, data.shape), fmt, dtype)


def _blocks(x: jax.Array, *, fmt: Format, block: Block, policy: ScalePolicy) -> tuple[jax.Array, jax.Array]:
    scale = amax_to_scale(_block_amax(x, block), fmt, policy)
    return quantize_by_jnp(x, _expanded(scale, block, x.shape), fmt=fmt), scale


def _plan_of_blocks(plans: Any, x: Any, *, fmt: Format, block: Block, policy: ScalePolicy) -> Any:
    return plans.blockwise(*as_matrix(x), str(x.dtype), fmt, block[0], policy, inverse=False)


def _has_kernel(x: Any, *, fmt: Format, block: Block, policy: ScalePolicy) -> bool:
    return block == (1, 128) or (block == (128, 128) and x.ndim == 2)


def _mx(x: jax.Array, *, fmt: Format, mode: MxMode) -> tuple[jax.Array, jax.Array]:
    codes = amax_to_e8m0(_block_amax(x, MX_BLOCK), fmt, mode)
    return quantize_by_jnp(x, _expanded(e8m0_to_scale(codes), MX_BLOCK, x.shape), fmt=fmt), codes


_BLOCKS = KernelOp(name="fp8_blocks", reference=_blocks, plan=_plan_of_blocks, fits=_has_kernel)
_MX = KernelOp(
    name="fp8_mx",
    reference=_mx,
    plan=lambda plans, x, *, fmt, mode: plans.mx(*as_matrix(x), str(x.dtype), fmt, mode),
    fits=lambda x, *, fmt, mode: True,
)


def _block_amax(x: jax.Array, block: Block) -> jax.Array:
    """Return max |x| of each block, float32 `block_grid(x.shape, block)`."""
    if x.ndim == 1:
        return _block_amax(x[None], (1, block[1]))[0]
    grid, (rows, columns) = block_grid(x.shape, block), block
    missing = (grid[-2] * rows - x.shape[-2], grid[-1] * columns - x.shape[-1])
    # Partial blocks are padded with zeros, which do not change an amax. Bits are padded, because in JAX 0.12 XLA on
    # CPUs converts bfloat16 to float32 to pad it, and flushes its subnormals.
    bits = lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}")
    filled = jnp.pad(bits, [(0, 0)] * (x.ndim - 2) + [(0, n) for n in missing])
    split = lax.bitcast_convert_type(filled, x.dtype).reshape(*grid[:-1], rows, grid[-1], columns)
    return amax_by_jnp(split, axis=(-3, -1))


def _expanded(scale: ArrayLike, block: Block, shape: tuple[int, ...]) -> jax.Array:
    """Repeat each block's scale over the block; return float32 of `shape`.

    Raises:
        Fp8Error: If the dtype is not supported, or the shape of `scale` is not `block_grid(shape, block)`.
    """
    array = as_float32(scale, "scale")
    if array.shape != block_grid(shape, block):
        raise Fp8Error(
            f"Scales for data of shape {tuple(shape)} in blocks of {tuple(block)} must have shape "
            f"{block_grid(shape, block)}, got {array.shape}."
        )
    if len(shape) == 1:
        return _expanded(array[None], (1, block[1]), (1, *shape))[0]
    *batch, grid_rows, grid_columns = array.shape
    rows, columns = block
    repeated = jnp.broadcast_to(array[..., :, None, :, None], (*batch, grid_rows, rows, grid_columns, columns))
    return repeated.reshape(*batch, grid_rows * rows, grid_columns * columns)[..., : shape[-2], : shape[-1]]
