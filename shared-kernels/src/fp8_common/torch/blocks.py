"""Blocks of elements that share a scale: amax, shapes and broadcasts."""

from collections.abc import Sequence

import torch

from fp8_common._reference.quantize import block_grid, check_block, check_grid
from fp8_common.torch.numerics import amax_of, amax_over

Block = tuple[int, int] | None
"""Block size (rows, columns) in the last two dimensions; 0 means the whole side, None the whole tensor."""


def broadcasts(block: Block) -> bool:
    """Return whether scales broadcast to the tensor.

    They do if each side of the block is 1 or the whole side.
    """
    return block is None or max(block) < 2


def scale_shape(shape: Sequence[int], block: Block) -> tuple[int, ...]:
    """Return the shape of a tensor's scales, () for a single one.

    The last two dimensions are divided by the sides of the block, rounded up; whole sides become 1.
    """
    if block is None:
        return ()
    sides = (1,) * (len(shape) - 2) + block[-min(len(shape), 2) :]
    return tuple(-(-size // side) if side else 1 for size, side in zip(shape, sides, strict=True))


def amax_by(x: torch.Tensor, block: Block) -> torch.Tensor:
    """Return max |x| of each block, float32 `scale_shape(x.shape, block)`."""
    if block is None:
        return amax_of(x)
    if not broadcasts(block):
        return block_amax(x, block)
    return amax_over(x, [dim for dim, side in zip((-2, -1), block, strict=True) if side == 0], keepdim=True)


def block_amax(x: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """Return max |x| of each block, float32 `block_grid(x.shape, block)`."""
    rows, columns = check_block(block, x.ndim)
    if x.ndim == 1:
        return block_amax(x[None], block)[0]
    for dim, side in ((-1, columns), (-2, rows)):
        if cut := x.shape[dim] % side:
            # Partial blocks are reduced separately, with smaller sides, because padding would copy `x`.
            whole = x.shape[dim] - cut
            rest = block_amax(x.narrow(dim, whole, cut), (rows, cut) if dim == -1 else (cut, columns))
            return torch.cat([block_amax(x.narrow(dim, 0, whole), block), rest], dim) if whole else rest
    grid = block_grid(tuple(x.shape), block)
    return amax_over(x.reshape(*grid[:-1], rows, grid[-1], columns), (-3, -1), keepdim=False)


def split_blocks(x: torch.Tensor, scale: torch.Tensor, block: Block) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a view of `x` and scales that broadcast to it.

    Dimensions are split into blocks. A dimension whose last block is partial is not split; scales are repeated along
    it.

    Raises:
        Fp8Error: If the shape of `scale` is not `block_grid(x.shape, block)`.
    """
    if block is None or broadcasts(block):
        return x, scale
    rows, columns = check_block(block, x.ndim)
    check_grid(scale.shape, block, x.shape)
    if rows > 1:
        x, scale = _split_along(x, scale, x.ndim - 2, rows)
    # The columns are still the last dimension of `x`, also if the rows were split.
    return _split_along(x, scale, x.ndim - 1, columns)


def _split_along(x: torch.Tensor, scale: torch.Tensor, dim: int, side: int) -> tuple[torch.Tensor, torch.Tensor]:
    if x.shape[dim] % side:
        return x, scale.repeat_interleave(side, dim).narrow(dim, 0, x.shape[dim])
    return x.unflatten(dim, (scale.shape[dim], side)), scale.unsqueeze(dim + 1)


def expand_blocks(scale: torch.Tensor, block: tuple[int, int], shape: torch.Size) -> torch.Tensor:
    """Repeat each block's scale over the block; return float32 of `shape`.

    Raises:
        Fp8Error: If the shape of `scale` is not `block_grid(shape, block)`.
    """
    check_grid(scale.shape, block, shape)
    rows = scale.repeat_interleave(block[1], -1).narrow(-1, 0, shape[-1])
    if len(shape) == 1 or block[0] == 1:
        return rows
    return rows.repeat_interleave(block[0], -2).narrow(-2, 0, shape[-2])
