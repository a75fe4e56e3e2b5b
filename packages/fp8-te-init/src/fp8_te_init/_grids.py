"""Decides which scale belongs to which element of a weight, also where a rank holds only some of its rows.

Every rank keeps the scales of the whole weight: one number, one per output row, or one per 128x128 block. That is at
most 4 bytes for a row or for 16,384 elements, and it means that a rank can read what any other rank sends.
"""

import torch
import torch.nn.functional as F

from fp8_common import CastRecipe
from fp8_common._blocks import Block, block_grid
from fp8_common.torch._amax import amax_all, amax_over, float_key
from fp8_common.torch._quantize import block_amax, expand_blocks

BLOCK: Block = (128, 128)


def block_of(cast: CastRecipe) -> Block | None:
    """Return the block of each scale, where scales do not broadcast to the weight."""
    return BLOCK if cast.granularity == "blockwise_128x128" else None


def grid_shape(cast: CastRecipe, full_shape: torch.Size) -> tuple[int, ...]:
    """Return the shape of the scales of a whole weight [rows, columns]."""
    if cast.granularity == "rowwise":
        return full_shape[0], 1
    return block_grid(tuple(full_shape), BLOCK) if block_of(cast) else ()


def amax_keys(values: torch.Tensor, cast: CastRecipe, full_shape: torch.Size, first_row: int) -> torch.Tensor:
    """Return the integer keys of the absolute maxima of some rows, in the place they have in the whole weight.

    Args:
        values: [n, columns], rows `first_row` to `first_row + n` of the weight; n may be 0.
        cast: How the weight is cast.
        full_shape: [rows, columns] of the weight.
        first_row: Index of the first row.

    Returns:
        int32 [k]: as many for any share of the rows, 0 where the share has nothing. Their MAX over ranks is exact.
    """
    if cast.granularity == "tensorwise":
        return float_key(amax_all(values)).reshape(1)
    keys = torch.zeros(grid_shape(cast, full_shape), dtype=torch.int32, device=values.device)
    if values.shape[0] and cast.granularity == "rowwise":
        keys[first_row : first_row + values.shape[0]] = float_key(amax_over(values, (-1,), keepdim=True))
    elif values.shape[0]:
        block, offset = divmod(first_row, BLOCK[0])
        part = float_key(block_amax(F.pad(values, (0, 0, offset, 0)), BLOCK))
        keys[block : block + part.shape[0]] = part
    return keys.reshape(-1)


def scale_of_rows(
    scale: torch.Tensor, cast: CastRecipe, full_shape: torch.Size, first_row: int, rows: int
) -> torch.Tensor:
    """Return scales that broadcast to `rows` rows from `first_row` on; rows of padding get the scale 1.

    Args:
        scale: float32 scales of the whole weight.
        cast: How the weight is cast.
        full_shape: [rows, columns] of the weight.
        first_row: Index of the first row.
        rows: Number of rows; those past the end of the weight are padding.
    """
    if cast.granularity == "tensorwise":
        return scale
    wide = scale if cast.granularity == "rowwise" else expand_blocks(scale, BLOCK, full_shape)
    wide = wide[first_row : first_row + rows]
    return F.pad(wide, (0, 0, 0, rows - wide.shape[0]), value=1.0)
