"""Decides tensorwise scaling without agreement: each rank scales its own shard, and the scale travels with the codes.

No all-reduce, one float per rank on the wire; results depend on how the weight is cut. After the gather the scales are
those of rows, and the products are those of row-wise scaling.
"""

import dataclasses
import math
from typing import ClassVar

import torch
import torch.distributed as dist

from fp8_common import Fp8Error
from fp8_common.torch import _dispatch as dispatch
from fp8_common.torch._fsdp import WeightState
from fp8_torch_fsdp._strategies.base import Strategy, wire_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShardwiseStrategy(Strategy):
    """Dynamic scales [rows, 1], equal for the rows of one rank."""

    scales_each_part: ClassVar[bool] = True

    def local_keys(self, shard: torch.Tensor, state: WeightState) -> torch.Tensor:
        """Return no keys.

        Raises:
            Fp8Error: The shards are not whole rows.
        """
        if state.shard_dim != 0:
            raise Fp8Error(
                f'{state.name} is sharded along dimension {state.shard_dim}, but scale_scope="shard" needs shards of '
                'whole rows. Use scale_scope="tensor", or leave it out of shard_placement_fn.'
            )
        return torch.zeros(0, dtype=torch.int32, device=shard.device)

    def scale_from_keys(self, keys: torch.Tensor, state: WeightState) -> torch.Tensor | None:
        """Return None: the scales travel."""

    def cast_whole(
        self, weight: torch.Tensor, *, record: bool, group: dist.ProcessGroup | None = None, splits_rows: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return codes of the shape of `weight`, and its one scale for each row."""
        scale = dispatch.scale_from_amax(dispatch.amax(weight), self.cast.fp8_format, self.cast.policy)
        return dispatch.quantize(weight, scale, self.cast.fp8_format), scale.expand(*weight.shape[:-1], 1)

    def to_wire(
        self, shard: torch.Tensor, state: WeightState, world_size: int
    ) -> tuple[tuple[torch.Tensor, ...], torch.Tensor | None]:
        """Return codes and the scale's bytes as two buffers; keep the scale on one rank."""
        scale = dispatch.scale_from_amax(dispatch.amax(shard), self.cast.fp8_format, self.cast.policy)
        codes = wire_of(dispatch.quantize(shard, scale, self.cast.fp8_format), state)
        if world_size == 1:
            return codes, scale.reshape(1)
        return (*codes, scale.reshape(1).view(torch.uint8)), None

    def scale_from_wire(
        self, buffers: tuple[torch.Tensor, ...], kept: torch.Tensor | None, full_shape: torch.Size
    ) -> torch.Tensor:
        """Return the scales [..., rows, 1] of the whole weight."""
        own = kept if kept is not None else buffers[1].reshape(-1).view(torch.float32)
        along = -(-full_shape[0] // own.numel())
        rows = own.repeat_interleave(along)[: full_shape[0]]
        each = math.prod(full_shape[1:-1])
        return rows.repeat_interleave(each).reshape(*full_shape[:-1], 1)
