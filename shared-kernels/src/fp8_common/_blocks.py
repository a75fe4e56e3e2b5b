"""Scale blocks of the last two dimensions: their grid, the amax of each, and scales repeated over them.

Blocks at the right and lower edges may be partial. Scales lie in row-major order of the blocks.
"""

import numpy as np
from numpy.typing import NDArray

from fp8_common._amax import amax
from fp8_common._errors import Fp8Error

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
    """Return the shape of the scales for data of `shape`: the last two dimensions divided, rounded up."""
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


def expand_blocks(scale: NDArray[np.float32], block: Block, shape: tuple[int, ...]) -> NDArray[np.float32]:
    """Repeat each block's scale over the block, cut to `shape`.

    Raises:
        Fp8Error: `scale` does not have the shape that `block_grid` gives.
    """
    if tuple(scale.shape) != block_grid(shape, block):
        raise Fp8Error(
            f"Scales for data of shape {tuple(shape)} in blocks of {tuple(block)} must have shape "
            f"{block_grid(shape, block)}, got {tuple(scale.shape)}."
        )
    # Repeated past the edge and then cut: the last block may be partial.
    wide = np.repeat(scale, block[1], axis=-1)[..., : shape[-1]]
    return wide if len(shape) == 1 or block[0] == 1 else np.repeat(wide, block[0], axis=-2)[..., : shape[-2], :]
