"""Tensorwise scaling without agreement: each rank scales its own shard, and the scale travels with the codes.

No all-reduce, one float per rank on the wire; results depend on how the weight is cut. After the gather the scales are
those of rows, and the products are those of row-wise scaling.
"""

import dataclasses
import math
from typing import ClassVar

import torch
import torch.distributed as dist

from fp8_common.torch.plugin import ShardGeometry, dispatch, fsdp
from fp8_torch_fsdp._strategies.base import Strategy, WireBuffers, no_keys


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShardwiseStrategy(Strategy):
    """Dynamic scales [rows, 1], equal for the rows of one rank."""

    scales_each_part: ClassVar[bool] = True

    def problem(self, geometry: ShardGeometry) -> str | None:
        """Return why the shards are not whole rows."""
        if geometry.dim == 0:
            return None
        return (
            f'is sharded along dimension {geometry.dim}, but scale_scope="shard" needs shards of whole rows. Use '
            'scale_scope="tensor", or leave it out of shard_placement_fn.'
        )

    def local_keys(self, shard: torch.Tensor, geometry: ShardGeometry) -> torch.Tensor:
        """Return no keys."""
        return no_keys(shard)

    def scale_from_keys(self, keys: torch.Tensor, geometry: ShardGeometry) -> torch.Tensor | None:
        """Return None: the scales travel."""

    def cast_whole(
        self, weight: torch.Tensor, *, record: bool, group: dist.ProcessGroup | None = None, splits_rows: bool = False
    ) -> dispatch.Cast:
        """Return codes of the shape of `weight`, and its one scale for each row."""
        made, shape = self.layout.cast_whole(weight), (*weight.shape[:-1], 1)
        return dispatch.Cast(made.codes, made.scale.expand(shape), made.scale_inv.expand(shape))

    def to_wire(
        self, shard: torch.Tensor, geometry: ShardGeometry, scale: torch.Tensor | None, world_size: int
    ) -> WireBuffers:
        """Return codes and the scale's bytes as two buffers; keep the scale on one rank."""
        # The agreed `scale` is not used: there is none. The shard is a whole tensor to its layout.
        codes, own = self.layout.cast_whole(shard)[:2]
        padded, own = fsdp.pad_rows(codes, geometry.padded_shape), own.reshape(1)
        return ((padded,), own) if world_size == 1 else ((padded, own.view(torch.uint8)), None)

    def scale_from_wire(
        self, gathered: tuple[torch.Tensor, ...], kept: torch.Tensor | None, full_shape: torch.Size
    ) -> torch.Tensor:
        """Return the scales [..., rows, 1] of the whole weight."""
        own = kept if kept is not None else gathered[1].reshape(-1).view(torch.float32)
        # One scale for each rank; FSDP2 gives ceil(rows / ranks) rows to each, so that this many rows share it.
        along = -(-full_shape[0] // own.numel())
        rows = own.repeat_interleave(along)[: full_shape[0]]
        each = math.prod(full_shape[1:-1])
        return rows.repeat_interleave(each).reshape(*full_shape[:-1], 1)
