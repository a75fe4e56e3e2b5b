"""Decides row-wise scaling of weights: one scale per output row, made where the row lives and sent with it.

One FP8 copy serves forward and backward: the backward folds the row scales into the gradient before its own cast.
"""

import dataclasses
import math

import torch

from fp8_common.torch import dispatch
from fp8_common.torch.fsdp import WeightState, pad_rows
from fp8_torch_fsdp.strategies.base import Strategy, wire_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowwiseStrategy(Strategy):
    """Dynamic scales [rows, 1]. Whole rows live on one rank, so nothing is reduced."""

    def local_keys(self, shard: torch.Tensor, state: WeightState) -> torch.Tensor:
        """Return no keys."""
        return torch.zeros(0, dtype=torch.int32, device=shard.device)

    def scale_from_keys(self, keys: torch.Tensor, state: WeightState) -> torch.Tensor | None:
        """Return None: each rank has the scales of its rows."""

    def cast_whole(self, weight: torch.Tensor, *, record: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Return codes [..., rows, columns] and scales [..., rows, 1]."""
        return dispatch.quantize_rowwise(weight, self.cast.fp8_format, self.cast.policy)

    def to_wire(
        self, shard: torch.Tensor, state: WeightState, world_size: int
    ) -> tuple[tuple[torch.Tensor, ...], torch.Tensor | None]:
        """Return codes and scales as two buffers; keep the scales on one rank, where FSDP2 passes on one buffer."""
        codes, scale = self.cast_whole(shard, record=False)
        if world_size == 1:
            return wire_of(codes, state), scale
        scale_bytes = pad_rows(scale.contiguous(), torch.Size((*state.padded_shape[:-1], 4)))
        return (*wire_of(codes, state), scale_bytes), None

    def scale_from_wire(
        self, buffers: tuple[torch.Tensor, ...], kept: torch.Tensor | None, full_shape: torch.Size
    ) -> torch.Tensor:
        """Return the scales [..., rows, 1] of the whole weight, sharing the gathered buffer."""
        if len(buffers) == 1:
            return super().scale_from_wire(buffers, kept, full_shape)
        rows = math.prod(full_shape[:-1])
        return buffers[1].view(-1).view(torch.float32)[:rows].view(*full_shape[:-1], 1)
