"""Quantization and dequantization: the definition for all frameworks.

At every granularity, the cast is RN_fmt(RN32(float32(x) * scale)): multiply in float32, then round once and saturate.
Infinity and NaN become NaN. A finite x whose multiplication overflows saturates like other large numbers. A scale
multiplies values into FP8; dequantization multiplies by RN32(1 / scale).
"""

from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from fp8_common._reference.rounding import decode, encode, encode_stochastic
from fp8_common._reference.scaling import (
    amax,
    amax_to_e8m0,
    amax_to_scale,
    as_float32,
    e8m0_to_scale,
    e8m0_to_scale_inv,
    reciprocal,
)
from fp8_common.errors import Fp8Error
from fp8_common.formats import Format, get_data_format
from fp8_common.policy import CANONICAL, FLOAT32_MAX, MxMode, ScalePolicy

Block = tuple[int, int]
"""Block size (rows, columns) in the last two dimensions."""


def check_block(block: Block, ndim: int) -> Block:
    """Return `block` if it can divide a tensor of `ndim` dimensions.

    Raises:
        Fp8Error: If a side is not positive, the tensor is a scalar, or `ndim` is 1 and the block has several rows.
    """
    rows, columns = block
    if rows < 1 or columns < 1 or ndim < (2 if rows > 1 else 1):
        raise Fp8Error(
            f"Block {tuple(block)} cannot cut a tensor of {ndim} dimension(s): sides must be positive, and a block of "
            "several rows needs at least two dimensions."
        )
    return block


def block_grid(shape: tuple[int, ...], block: Block) -> tuple[int, ...]:
    """Return the shape of the block scales for data of `shape`.

    The last two dimensions are divided by the sides of the block, rounded up.
    """
    # Leading dimensions are batch dimensions, which are not divided. A vector has no rows, only columns.
    sides = (1,) * (len(shape) - 2) + tuple(block)[-min(len(shape), 2) :]
    return tuple(-(-n // side) for n, side in zip(shape, sides, strict=True))


def block_amax(x: NDArray[np.float32], block: Block) -> NDArray[np.float32]:
    """Return max |x| of each block, float32 `block_grid(x.shape, block)`."""
    grid = block_grid(x.shape, block)
    if x.ndim == 1:
        return block_amax(x[None], (1, block[1]))[0]
    rows, columns = block
    padding = [(0, 0)] * (x.ndim - 2) + [(0, grid[-2] * rows - x.shape[-2]), (0, grid[-1] * columns - x.shape[-1])]
    # Partial blocks are padded with zeros, which do not change an amax.
    split = np.pad(x, padding).reshape(*grid[:-1], rows, grid[-1], columns)
    return amax(split, axis=(-3, -1))


def check_grid(scale: tuple[int, ...], block: Block, shape: tuple[int, ...]) -> None:
    """Raise if block scales have the wrong shape.

    Args:
        scale: Shape of the scales.
        block: Block size.
        shape: Shape of the data.

    Raises:
        Fp8Error: If the shape of the scales is not `block_grid(shape, block)`.
    """
    if tuple(scale) != (grid := block_grid(tuple(shape), block)):
        raise Fp8Error(
            f"Scales for data of shape {tuple(shape)} in blocks of {tuple(block)} must have shape {grid}, "
            f"got {tuple(scale)}."
        )


def expand_blocks(scale: NDArray[np.float32], block: Block, shape: tuple[int, ...]) -> NDArray[np.float32]:
    """Repeat each block's scale over the block; return float32 of `shape`.

    Raises:
        Fp8Error: If the shape of `scale` is not `block_grid(shape, block)`.
    """
    check_grid(scale.shape, block, shape)
    # Repeated past the edge and then cut off, because the last block may be partial.
    rows = np.repeat(scale, block[1], axis=-1)[..., : shape[-1]]
    return rows if len(shape) == 1 or block[0] == 1 else np.repeat(rows, block[0], axis=-2)[..., : shape[-2], :]


MX_BLOCK = (1, 32)
"""Block size of OCP MX."""

ArrayT = TypeVar("ArrayT")
"""Array type of a framework."""


class Quantized(NamedTuple, Generic[ArrayT]):
    """FP8 data and their scales.

    Attributes:
        data: FP8 codes of the shape of the input: uint8 in NumPy, the native float8 dtype in torch and JAX.
        scale: float32 scales into FP8. For MX, E8M0 codes of the scales back from FP8.
    """

    data: ArrayT
    scale: ArrayT


def quantize(x: ArrayLike, scale: ArrayLike, fmt: str | Format) -> NDArray[np.uint8]:
    """Return the FP8 codes of `x * scale`.

    Args:
        x: float16, bfloat16 or float32, any shape.
        scale: float32, broadcastable to `x`.
        fmt: FP8 format.

    Returns:
        uint8 codes of the shape of `x`; the NaN code if `x` is infinite or NaN, for any scale.

    Raises:
        Fp8Error: If the dtype or the format is not supported.
    """
    return encode(_scaled(x, scale), fmt)


def quantize_stochastic(x: ArrayLike, scale: ArrayLike, fmt: str | Format, random_bits: ArrayLike) -> NDArray[np.uint8]:
    """Quantize with stochastic rounding; see `encode_stochastic`.

    Args:
        x: float16, bfloat16 or float32, any shape.
        scale: float32, broadcastable to `x`.
        fmt: FP8 format.
        random_bits: uint32 of the shape of `x`, uniformly distributed.

    Returns:
        uint8 codes of the shape of `x`.

    Raises:
        Fp8Error: If the dtype or format is not supported, or `random_bits` is not uint32 of the shape of `x`.
    """
    return encode_stochastic(_scaled(x, scale), fmt, random_bits)


def dequantize(q: ArrayLike, scale: ArrayLike, fmt: str | Format, dtype: DTypeLike = np.float32) -> NDArray[np.generic]:
    """Return `q * RN32(1 / scale)`, in float32 and then rounded to `dtype`.

    Args:
        q: uint8 codes, any shape.
        scale: float32 scale into FP8, broadcastable to `q`.
        fmt: FP8 format of `q`.
        dtype: float32, float16 or bfloat16.

    Returns:
        Values in `dtype`, of the shape of `q`.

    Raises:
        Fp8Error: If the dtype or the format is not supported.
    """
    # A multiplication by the rounded reciprocal, like on GPUs. A division differs in the last bit.
    return _unscaled(decode(q, get_data_format(fmt)), reciprocal(scale), dtype)


def quantize_rowwise(
    x: ArrayLike, fmt: str | Format, axis: int = -1, policy: ScalePolicy = CANONICAL
) -> Quantized[NDArray[Any]]:
    """Quantize with one scale for each slice along `axis`.

    Args:
        x: float16, bfloat16 or float32, any shape of at least one dimension.
        fmt: FP8 format.
        axis: Axis whose elements share a scale. For a matrix, -1 gives a scale per row, 0 a scale per column.
        policy: Rule for the scales.

    Returns:
        uint8 codes of the shape of `x`, and float32 scales of that shape with `axis` of length 1, so that they
        broadcast.

    Raises:
        Fp8Error: If the dtype or the format is not supported.
    """
    # Without a previous scale, slices of zeros and slices with an infinity or NaN get the scale 1.0, unless the policy
    # defines another one.
    scale = amax_to_scale(amax(x, axis=axis, keepdims=True), fmt, policy)
    return Quantized(quantize(x, scale, fmt), scale)


def quantize_blockwise(
    x: ArrayLike, fmt: str | Format, block: Block = (1, 128), policy: ScalePolicy = CANONICAL
) -> Quantized[NDArray[Any]]:
    """Quantize with one scale per block of the last two dimensions.

    Args:
        x: float16, bfloat16 or float32 [..., M, N]. Blocks at the edges may be partial.
        fmt: FP8 format.
        block: Block size (rows, columns): (1, 128) for activations and gradients, (128, 128) for weights.
        policy: Rule for the scales.

    Returns:
        uint8 codes [..., M, N], and float32 scales [..., ceil(M / rows), ceil(N / columns)].

    Raises:
        Fp8Error: If the dtype or format is not supported, or the block cannot divide `x`.
    """
    array = as_float32(x)
    scale = amax_to_scale(block_amax(array, check_block(block, array.ndim)), fmt, policy)
    return Quantized(quantize(array, expand_blocks(scale, block, array.shape), fmt), scale)


def dequantize_blockwise(
    q: ArrayLike, scale: ArrayLike, fmt: str | Format, block: Block = (1, 128), dtype: DTypeLike = np.float32
) -> NDArray[np.generic]:
    """Dequantize the result of `quantize_blockwise`.

    Args:
        q: uint8 codes [..., M, N].
        scale: float32 scales into FP8 [..., ceil(M / rows), ceil(N / columns)].
        fmt: FP8 format of `q`.
        block: Block size (rows, columns).
        dtype: float32, float16 or bfloat16.

    Returns:
        Values in `dtype`, [..., M, N].

    Raises:
        Fp8Error: If the dtype or format is not supported, the block cannot divide `q`, or scales have the wrong shape.
    """
    codes = np.asarray(q)
    check_block(block, codes.ndim)
    return dequantize(codes, expand_blocks(as_float32(scale, "scale"), block, codes.shape), fmt, dtype)


def quantize_mx(x: ArrayLike, fmt: str | Format, mode: MxMode = "rceil") -> Quantized[NDArray[Any]]:
    """Quantize to OCP MX.

    Each block of 32 consecutive values of the last dimension has one E8M0 scale.

    Args:
        x: float16, bfloat16 or float32 [..., N]. The last block may be partial.
        fmt: Format of the elements.
        mode: Rounding mode of the scale; see `amax_to_e8m0`.

    Returns:
        uint8 codes [..., N], and uint8 E8M0 codes [..., ceil(N / 32)]. 2^(code - 127) is the scale back from FP8. The
        code 255 marks a block with an infinity or a NaN; all its values become NaN.

    Raises:
        Fp8Error: If the dtype, format or mode is not supported, or `x` is a scalar.
    """
    array = as_float32(x)
    codes = amax_to_e8m0(block_amax(array, check_block(MX_BLOCK, array.ndim)), fmt, mode)
    scale = expand_blocks(e8m0_to_scale(codes), MX_BLOCK, array.shape)
    return Quantized(quantize(array, scale, fmt), codes)


def dequantize_mx(
    q: ArrayLike, codes: ArrayLike, fmt: str | Format, dtype: DTypeLike = np.float32
) -> NDArray[np.generic]:
    """Dequantize the result of `quantize_mx`; exact in float32.

    Args:
        q: uint8 codes [..., N].
        codes: uint8 E8M0 codes [..., ceil(N / 32)].
        fmt: Format of the elements.
        dtype: float32, float16 or bfloat16.

    Returns:
        Values in `dtype`, [..., N].

    Raises:
        Fp8Error: If the dtype or format is not supported, `q` is a scalar, or `codes` has the wrong shape.
    """
    data = np.asarray(q)
    check_block(MX_BLOCK, data.ndim)
    scale_inv = expand_blocks(e8m0_to_scale_inv(codes), MX_BLOCK, data.shape)
    return _unscaled(decode(data, get_data_format(fmt)), scale_inv, dtype)


def _scaled(x: ArrayLike, scale: ArrayLike) -> NDArray[np.float32]:
    value = as_float32(x)
    with np.errstate(all="ignore"):
        # Multiply in float32, like all frameworks and GPUs: without this rounding before the one to FP8, codes near
        # midpoints would differ.
        scaled = value * as_float32(scale, "scale")
    # Only an infinite x stays infinite: a finite x that overflows is a large number, which saturates.
    return np.where(np.isinf(value), value, np.clip(scaled, -FLOAT32_MAX, FLOAT32_MAX))


def _unscaled(values: NDArray[np.float32], scale_inv: NDArray[np.float32], dtype: DTypeLike) -> NDArray[np.generic]:
    with np.errstate(all="ignore"):  # overflow to infinity in float16 is a result, not an error
        return (values * scale_inv).astype(dtype)
