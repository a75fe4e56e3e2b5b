"""Row-wise scaling of weights: one scale per output row, made where the row lives and sent with it.

One FP8 copy serves forward and backward: the backward folds the row scales into the gradient before its own cast. Where
rows are cut - along the last dimension, by FSDP2 or by row-parallel layers - their scales are agreed on like others.
"""

import dataclasses
import math

import torch
import torch.distributed as dist

from fp8_common.torch.plugin import ShardGeometry, dispatch, fsdp, max_over_ranks
from fp8_torch_fsdp._strategies.base import Strategy, WireBuffers, no_keys


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowwiseStrategy(Strategy):
    """Dynamic scales [rows, 1]. While whole rows live on one rank, nothing is reduced."""

    def local_keys(self, shard: torch.Tensor, geometry: ShardGeometry) -> torch.Tensor:
        """Return no keys, or those of all rows of the weight."""
        return no_keys(shard) if _scales_travel(geometry) else self.layout.keys(shard, geometry)

    def scale_from_keys(self, keys: torch.Tensor, geometry: ShardGeometry) -> torch.Tensor | None:
        """Return None where each rank has the scales of its rows, else those of all rows."""
        return None if _scales_travel(geometry) else self.layout.scales(keys, geometry.full_shape)

    def cast_whole(
        self, weight: torch.Tensor, *, record: bool, group: dist.ProcessGroup | None = None, splits_rows: bool = False
    ) -> dispatch.Cast:
        """Return codes [..., rows, columns] and scales [..., rows, 1]."""
        if not splits_rows:
            return self.layout.cast_whole(weight)
        geometry = ShardGeometry(full_shape=weight.shape)
        (keys,), _ = max_over_ranks([self.layout.keys(weight, geometry)], group)
        scale = self.layout.scales(keys, weight.shape)
        codes = dispatch.quantize(weight, scale, self.cast.fp8_format)
        return dispatch.Cast(codes, scale, dispatch.reciprocal(scale))

    def to_wire(
        self, shard: torch.Tensor, geometry: ShardGeometry, scale: torch.Tensor | None, world_size: int
    ) -> WireBuffers:
        """Return codes and scales as two buffers; keep the scales on one rank, where FSDP2 passes on one buffer."""
        if not _scales_travel(geometry):
            return super().to_wire(shard, geometry, scale, world_size)
        codes, own = self.layout.cast_whole(shard)[:2]
        padded = fsdp.pad_rows(codes, geometry.padded_shape)
        if world_size == 1:
            return (padded,), own
        # 4: the bytes of a float32 scale, since everything travels as uint8
        scale_bytes = fsdp.pad_rows(own.contiguous(), torch.Size((*geometry.padded_shape[:-1], 4)))
        return (padded, scale_bytes), None

    def scale_from_wire(
        self, gathered: tuple[torch.Tensor, ...], kept: torch.Tensor | None, full_shape: torch.Size
    ) -> torch.Tensor:
        """Return the scales [..., rows, 1] of the whole weight, sharing the gathered buffer."""
        if len(gathered) == 1:
            return super().scale_from_wire(gathered, kept, full_shape)
        # padding is at the end of the gathered scales too
        rows = math.prod(full_shape[:-1])
        return gathered[1].view(-1).view(torch.float32)[:rows].view(*full_shape[:-1], 1)


def _scales_travel(geometry: ShardGeometry) -> bool:
    """Whether each rank scales its rows alone and sends the scales: whole rows, and buffers that FSDP2 only joins."""
    return geometry.dim == 0 and not geometry.splits_rows
