"""Quantization and dequantization at every granularity; the definition that all frameworks equal.

The cast is always RN_fmt(RN32(float32(x) * scale)): multiply in float32, then round once and saturate. Infinities and
NaN become NaN; a finite x that overflows in the multiplication saturates like other large numbers. Scales multiply into
FP8; going back multiplies by RN32(1 / scale).
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
"""(rows, columns) of a block in the last two dimensions."""


def check_block(block: Block, ndim: int) -> Block:
    """Return `block` if it can cut a tensor of `ndim` dimensions.

    Raises:
        Fp8Error: A side is not a positive integer, or rows > 1 on a tensor of fewer than two dimensions.
    """
    rows, columns = block
    if rows < 1 or columns < 1 or ndim < (2 if rows > 1 else 1):
        raise Fp8Error(
            f"Block {tuple(block)} cannot cut a tensor of {ndim} dimension(s): sides must be positive, and a block of "
            "several rows needs at least two dimensions."
        )
    return block


def block_grid(shape: tuple[int, ...], block: Block) -> tuple[int, ...]:
    """Return the shape of the scales of data of `shape`.

    The last two dimensions are divided, rounded up.
    """
    # Leading dimensions are batch dimensions, not divided; a vector has columns only, so its block loses the rows.
    sides = (1,) * (len(shape) - 2) + tuple(block)[-min(len(shape), 2) :]
    return tuple(-(-n // side) for n, side in zip(shape, sides, strict=True))


def block_amax(x: NDArray[np.float32], block: Block) -> NDArray[np.float32]:
    """Return max |x| of every block, float32 of shape `block_grid(x.shape, block)`."""
    grid = block_grid(x.shape, block)
    if x.ndim == 1:
        return block_amax(x[None], (1, block[1]))[0]
    rows, columns = block
    padding = [(0, 0)] * (x.ndim - 2) + [(0, grid[-2] * rows - x.shape[-2]), (0, grid[-1] * columns - x.shape[-1])]
    # Partial blocks are padded with zeros, which do not change an amax.
    split = np.pad(x, padding).reshape(*grid[:-1], rows, grid[-1], columns)
    return amax(split, axis=(-3, -1))


def check_grid(scale: tuple[int, ...], block: Block, shape: tuple[int, ...]) -> None:
    """Raise if scales lack the shape of `block_grid`.

    Shared by NumPy and torch.

    Raises:
        Fp8Error: They have another one.
    """
    if tuple(scale) != (grid := block_grid(tuple(shape), block)):
        raise Fp8Error(
            f"Scales for data of shape {tuple(shape)} in blocks of {tuple(block)} must have shape {grid}, "
            f"got {tuple(scale)}."
        )


def expand_blocks(scale: NDArray[np.float32], block: Block, shape: tuple[int, ...]) -> NDArray[np.float32]:
    """Repeat each block's scale over the block, cut to `shape`.

    Raises:
        Fp8Error: `scale` does not have the shape that `block_grid` gives.
    """
    check_grid(scale.shape, block, shape)
    # Repeated past the edge and then cut: the last block may be partial.
    wide = np.repeat(scale, block[1], axis=-1)[..., : shape[-1]]
    return wide if len(shape) == 1 or block[0] == 1 else np.repeat(wide, block[0], axis=-2)[..., : shape[-2], :]


MX_BLOCK = (1, 32)

ArrayT = TypeVar("ArrayT")
"""The array type of a framework."""


class Quantized(NamedTuple, Generic[ArrayT]):
    """FP8 data and the scales it was made with.

    Attributes:
        data: FP8 codes of the shape of the input (uint8 in NumPy, the native float8 dtype in torch and JAX).
        scale: float32 scales into FP8 (E8M0 codes, which go back from FP8, for MX).
    """

    data: ArrayT
    scale: ArrayT


def quantize(x: ArrayLike, scale: ArrayLike, fmt: str | Format) -> NDArray[np.uint8]:
    """Return the FP8 codes of `x * scale`.

    Args:
        x: float16, bfloat16 or float32, any shape.
        scale: float32, broadcastable to `x`.
        fmt: The FP8 format.

    Returns:
        uint8 codes of the shape of `x`; the NaN code if `x` is infinite or NaN, for any scale.

    Raises:
        Fp8Error: Unsupported dtype or format.
    """
    return encode(_scaled(x, scale), fmt)


def quantize_stochastic(x: ArrayLike, scale: ArrayLike, fmt: str | Format, random_bits: ArrayLike) -> NDArray[np.uint8]:
    """Quantize with random rounding; see `encode_stochastic`.

    Args:
        x: float16, bfloat16 or float32, any shape.
        scale: float32, broadcastable to `x`.
        fmt: The FP8 format.
        random_bits: uint32 of the shape of `x`, uniformly distributed.

    Returns:
        uint8 codes of the shape of `x`.

    Raises:
        Fp8Error: Unsupported dtype or format, or `random_bits` is not uint32 of this shape.
    """
    return encode_stochastic(_scaled(x, scale), fmt, random_bits)


def dequantize(q: ArrayLike, scale: ArrayLike, fmt: str | Format, dtype: DTypeLike = np.float32) -> NDArray[np.generic]:
    """Return `q * RN32(1 / scale)`, computed in float32 and rounded to `dtype`.

    Args:
        q: uint8 codes, any shape.
        scale: float32 scale into FP8, broadcastable to `q`.
        fmt: The FP8 format of `q`.
        dtype: float32, float16 or bfloat16.

    Returns:
        Values in `dtype`, of the shape of `q`.

    Raises:
        Fp8Error: Unsupported dtype or format.
    """
    # Multiply by the rounded reciprocal, do not divide: GPUs multiply, and the two differ in the last bit.
    return _unscaled(decode(q, get_data_format(fmt)), reciprocal(scale), dtype)


def quantize_rowwise(
    x: ArrayLike, fmt: str | Format, axis: int = -1, policy: ScalePolicy = CANONICAL
) -> Quantized[NDArray[Any]]:
    """Quantize with one scale for each slice along `axis`.

    Args:
        x: float16, bfloat16 or float32, any shape of at least one dimension.
        fmt: The FP8 format.
        axis: The axis that shares a scale: -1 gives a scale per row, 0 a scale per column of a matrix.
        policy: The scale rule.

    Returns:
        uint8 codes of the shape of `x`; float32 scales of that shape with `axis` of length 1, so that they broadcast.

    Raises:
        Fp8Error: Unsupported dtype or format.
    """
    # No previous scale: slices of zeros, and slices with an infinity or NaN, get 1.0 unless the policy defines another
    # scale.
    scale = amax_to_scale(amax(x, axis=axis, keepdims=True), fmt, policy)
    return Quantized(quantize(x, scale, fmt), scale)


def quantize_blockwise(
    x: ArrayLike, fmt: str | Format, block: Block = (1, 128), policy: ScalePolicy = CANONICAL
) -> Quantized[NDArray[Any]]:
    """Quantize with a scale for each (rows, columns) block.

    Blocks divide the last two dimensions.

    Args:
        x: float16, bfloat16 or float32 [..., M, N]; blocks at the edges may be partial.
        fmt: The FP8 format.
        block: (1, 128) for activations and gradients, (128, 128) for weights.
        policy: The scale rule.

    Returns:
        uint8 codes [..., M, N]; float32 scales [..., ceil(M / rows), ceil(N / columns)].

    Raises:
        Fp8Error: Unsupported dtype or format, or a block that cannot cut `x`.
    """
    array = as_float32(x)
    scale = amax_to_scale(block_amax(array, check_block(block, array.ndim)), fmt, policy)
    return Quantized(quantize(array, expand_blocks(scale, block, array.shape), fmt), scale)


def dequantize_blockwise(
    q: ArrayLike, scale: ArrayLike, fmt: str | Format, block: Block = (1, 128), dtype: DTypeLike = np.float32
) -> NDArray[np.generic]:
    """Undo `quantize_blockwise`.

    Args:
        q: uint8 codes [..., M, N].
        scale: float32 scales into FP8 [..., ceil(M / rows), ceil(N / columns)].
        fmt: The FP8 format of `q`.
        block: (rows, columns) of a block.
        dtype: float32, float16 or bfloat16.

    Returns:
        Values in `dtype`, [..., M, N].

    Raises:
        Fp8Error: Unsupported dtype or format, a block that cannot cut `q`, or scales of another shape.
    """
    codes = np.asarray(q)
    check_block(block, codes.ndim)
    return dequantize(codes, expand_blocks(as_float32(scale, "scale"), block, codes.shape), fmt, dtype)


def quantize_mx(x: ArrayLike, fmt: str | Format, mode: MxMode = "rceil") -> Quantized[NDArray[Any]]:
    """Quantize to OCP MX.

    One E8M0 scale for 32 consecutive values of the last dimension.

    Args:
        x: float16, bfloat16 or float32 [..., N]; the last block may be partial.
        fmt: The element format.
        mode: How the scale is rounded; see `amax_to_e8m0`.

    Returns:
        Codes [..., N]; E8M0 codes [..., ceil(N / 32)] (2^(code-127) goes back from FP8; 255 marks a block with an
        infinity or a NaN, all of whose data is NaN); both uint8.

    Raises:
        Fp8Error: Unsupported dtype, format or mode, or a scalar.
    """
    array = as_float32(x)
    codes = amax_to_e8m0(block_amax(array, check_block(MX_BLOCK, array.ndim)), fmt, mode)
    scale = expand_blocks(e8m0_to_scale(codes), MX_BLOCK, array.shape)
    return Quantized(quantize(array, scale, fmt), codes)


def dequantize_mx(
    q: ArrayLike, codes: ArrayLike, fmt: str | Format, dtype: DTypeLike = np.float32
) -> NDArray[np.generic]:
    """Undo `quantize_mx`; exact in float32.

    Args:
        q: uint8 codes [..., N].
        codes: uint8 E8M0 codes [..., ceil(N / 32)].
        fmt: The element format.
        dtype: float32, float16 or bfloat16.

    Returns:
        Values in `dtype`, [..., N].

    Raises:
        Fp8Error: Unsupported dtype or format, a scalar, or E8M0 codes of another shape.
    """
    data = np.asarray(q)
    check_block(MX_BLOCK, data.ndim)
    scale_inv = expand_blocks(e8m0_to_scale_inv(codes), MX_BLOCK, data.shape)
    return _unscaled(decode(data, get_data_format(fmt)), scale_inv, dtype)


def _scaled(x: ArrayLike, scale: ArrayLike) -> NDArray[np.float32]:
    value = as_float32(x)
    with np.errstate(all="ignore"):
        # Multiply in float32, as every framework and GPU does: a float64 result would not be rounded before the
        # rounding to FP8, which gives other codes near midpoints.
        product = value * as_float32(scale, "scale")
    # Infinity comes only from x: a finite x that overflows is a large number, which saturates.
    return np.where(np.isinf(value), value, np.clip(product, -FLOAT32_MAX, FLOAT32_MAX))


def _unscaled(values: NDArray[np.float32], scale_inv: NDArray[np.float32], dtype: DTypeLike) -> NDArray[np.generic]:
    with np.errstate(all="ignore"):  # overflow to infinity in float16 is a result, not an error
        return (values * scale_inv).astype(dtype)
