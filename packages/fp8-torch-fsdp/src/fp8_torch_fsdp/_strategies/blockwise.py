"""Decides block-wise scaling of weights: one scale per 128x128 block of the whole weight, however it is sharded.

Shards are cut without regard to blocks, so a block may span ranks. Every rank contributes the amax of its part of each
block to the fused all-reduce and then knows all scales, which need not travel with the codes. Under tensor parallelism
each rank's part has blocks of its own.
"""

import dataclasses
from typing import ClassVar

import torch
import torch.distributed as dist
import torch.nn.functional as F

from fp8_common._blocks import block_grid
from fp8_common.torch import _dispatch as dispatch
from fp8_common.torch._amax import float_key, key_to_float
from fp8_common.torch._fsdp import WeightState
from fp8_common.torch._quantize import block_amax, expand_blocks
from fp8_torch_fsdp._strategies.base import Strategy, own_part, wire_of

BLOCK = (128, 128)


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockwiseStrategy(Strategy):
    """Dynamic scales [ceil(rows / 128), ceil(columns / 128)]."""

    scales_each_part: ClassVar[bool] = True
    block: tuple[int, int] = dataclasses.field(default=BLOCK, init=False)

    def local_keys(self, shard: torch.Tensor, state: WeightState) -> torch.Tensor:
        """Return the keys of all blocks of the whole weight, zero where the block has nothing here."""
        grid = torch.zeros(block_grid(tuple(state.full_shape), BLOCK), dtype=torch.int32, device=shard.device)
        if shard.numel():
            axis = state.shard_dim - shard.ndim
            first, offset = divmod(state.first_index, BLOCK[axis] if axis >= -2 else 1)
            part = float_key(block_amax(F.pad(shard, (offset, 0) if axis == -1 else (0, 0, offset, 0)), BLOCK))
            grid.narrow(state.shard_dim, first, part.shape[state.shard_dim]).copy_(part)
        return grid.reshape(-1)

    def scale_from_keys(self, keys: torch.Tensor, state: WeightState) -> torch.Tensor | None:
        """Return the scales of all blocks."""
        amax = key_to_float(keys).view(block_grid(tuple(state.full_shape), BLOCK))
        return dispatch.scale_from_amax(amax, self.cast.fp8_format, self.cast.policy)

    def cast_whole(
        self, weight: torch.Tensor, *, record: bool, group: dist.ProcessGroup | None = None, splits_rows: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return codes of the shape of `weight` and the scales of all blocks."""
        return dispatch.quantize_blockwise(weight, self.cast.fp8_format, BLOCK, self.cast.policy)

    def to_wire(
        self, shard: torch.Tensor, state: WeightState, world_size: int
    ) -> tuple[tuple[torch.Tensor, ...], torch.Tensor | None]:
        """Return the codes; every rank has all scales."""
        scale = expand_blocks(state.agreed_scale, BLOCK, state.full_shape)
        codes = dispatch.quantize(shard, own_part(scale, shard, state), self.cast.fp8_format)
        return wire_of(codes, state), state.agreed_scale
