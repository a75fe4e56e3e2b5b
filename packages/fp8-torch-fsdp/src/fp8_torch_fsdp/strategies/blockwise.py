"""Decides block-wise scaling of weights: one scale per 128x128 block of the whole weight, however it is sharded.

Shards are cut by rows without regard to blocks, so a block may span ranks. Every rank contributes the amax of its part
of each block to the fused all-reduce and then knows all scales, which need not travel with the codes.
"""

import dataclasses

import torch
import torch.nn.functional as F

from fp8_common.blocks import block_grid
from fp8_common.torch import dispatch
from fp8_common.torch.amax import float_key, key_to_float
from fp8_common.torch.fsdp import WeightState
from fp8_common.torch.quantize import block_amax, expand_blocks
from fp8_torch_fsdp.strategies.base import Strategy, wire_of

BLOCK = (128, 128)


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockwiseStrategy(Strategy):
    """Dynamic scales [ceil(rows / 128), ceil(columns / 128)]."""

    block: tuple[int, int] = dataclasses.field(default=BLOCK, init=False)

    def local_keys(self, shard: torch.Tensor, state: WeightState) -> torch.Tensor:
        """Return the keys of all blocks of the whole weight, zero where the block has nothing here."""
        grid = torch.zeros(block_grid(tuple(state.full_shape), BLOCK), dtype=torch.int32, device=shard.device)
        if shard.numel():
            first, offset = divmod(state.first_row, BLOCK[0])
            part = float_key(block_amax(F.pad(shard, (0, 0, offset, 0)), BLOCK))
            grid[first : first + part.shape[0]] = part
        return grid.reshape(-1)

    def scale_from_keys(self, keys: torch.Tensor, state: WeightState) -> torch.Tensor | None:
        """Return the scales of all blocks."""
        amax = key_to_float(keys).view(block_grid(tuple(state.full_shape), BLOCK))
        return dispatch.scale_from_amax(amax, self.cast.fp8_format, self.cast.policy)

    def cast_whole(self, weight: torch.Tensor, *, record: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Return codes of the shape of `weight` and the scales of all blocks."""
        return dispatch.quantize_blockwise(weight, self.cast.fp8_format, BLOCK, self.cast.policy)

    def to_wire(
        self, shard: torch.Tensor, state: WeightState, world_size: int
    ) -> tuple[tuple[torch.Tensor, ...], torch.Tensor | None]:
        """Return the codes; every rank has all scales."""
        scale = expand_blocks(state.agreed_scale, BLOCK, state.full_shape)
        scale = scale[state.first_row : state.first_row + shard.shape[0]]
        return wire_of(dispatch.quantize(shard, scale, self.cast.fp8_format), state), state.agreed_scale
