"""The amax of each scale block, and scales repeated over their blocks, on the grid of `fp8_common._blocks`."""

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from fp8_common._blocks import Block, block_grid
from fp8_common._errors import Fp8Error
from fp8_common.jax._amax import amax
from fp8_common.jax._arrays import as_float32


def block_amax(x: jax.Array, block: Block) -> jax.Array:
    """Return max |x| of every block, float32 of shape `block_grid(x.shape, block)`."""
    if x.ndim == 1:
        return block_amax(x[None], (1, block[1]))[0]
    grid, (rows, columns) = block_grid(x.shape, block), block
    missing = (grid[-2] * rows - x.shape[-2], grid[-1] * columns - x.shape[-1])
    # Partial blocks are filled up with zeros, which change no amax.
    split = jnp.pad(x, [(0, 0)] * (x.ndim - 2) + [(0, n) for n in missing]).reshape(*grid[:-1], rows, grid[-1], columns)
    return amax(split, axis=(-3, -1))


def expand_blocks(scale: ArrayLike, block: Block, shape: tuple[int, ...]) -> jax.Array:
    """Repeat each block's scale over the block, cut to `shape`.

    Raises:
        Fp8Error: `scale` does not have the shape that `block_grid` gives, or an unsupported dtype.
    """
    array = as_float32(scale, "scale")
    if array.shape != block_grid(shape, block):
        raise Fp8Error(
            f"Scales for data of shape {tuple(shape)} in blocks of {tuple(block)} must have shape "
            f"{block_grid(shape, block)}, got {array.shape}."
        )
    if len(shape) == 1:
        return expand_blocks(array[None], (1, block[1]), (1, *shape))[0]
    *batch, grid_rows, grid_columns = array.shape
    rows, columns = block
    wide = jnp.broadcast_to(array[..., :, None, :, None], (*batch, grid_rows, rows, grid_columns, columns))
    return wide.reshape(*batch, grid_rows * rows, grid_columns * columns)[..., : shape[-2], : shape[-1]]
