"""Decides row-wise scaling of weights: one scale per output row, made where the row lives and sent with it.

One FP8 copy serves forward and backward: the backward folds the row scales into the gradient before its own cast. Where
rows are cut - along the last dimension, by FSDP2 or by row-parallel layers - their scales are agreed on like others.
"""

import dataclasses
import math

import torch
import torch.distributed as dist

from fp8_common.torch import _dispatch as dispatch
from fp8_common.torch._amax import amax_over, amax_over_ranks, float_key, key_to_float
from fp8_common.torch._fsdp import WeightState, pad_rows
from fp8_torch_fsdp._strategies.base import Strategy, own_part, wire_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowwiseStrategy(Strategy):
    """Dynamic scales [rows, 1]. While whole rows live on one rank, nothing is reduced."""

    def local_keys(self, shard: torch.Tensor, state: WeightState) -> torch.Tensor:
        """Return no keys, or those of all rows of the weight, zero for rows that have nothing here."""
        if _scales_travel(state):
            return torch.zeros(0, dtype=torch.int32, device=shard.device)
        keys = torch.zeros((*state.full_shape[:-1], 1), dtype=torch.int32, device=shard.device)
        if shard.numel():
            part = keys if state.shard_dim == shard.ndim - 1 else own_part(keys, shard, state)
            part.copy_(float_key(amax_over(shard, (-1,), keepdim=True)))
        return keys.reshape(-1)

    def scale_from_keys(self, keys: torch.Tensor, state: WeightState) -> torch.Tensor | None:
        """Return None where each rank has the scales of its rows, else those of all rows."""
        if _scales_travel(state):
            return None
        amax = key_to_float(keys).view(*state.full_shape[:-1], 1)
        return dispatch.scale_from_amax(amax, self.cast.fp8_format, self.cast.policy)

    def cast_whole(
        self, weight: torch.Tensor, *, record: bool, group: dist.ProcessGroup | None = None, splits_rows: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return codes [..., rows, columns] and scales [..., rows, 1]."""
        if not splits_rows:
            return dispatch.quantize_rowwise(weight, self.cast.fp8_format, self.cast.policy)
        amax = amax_over_ranks(amax_over(weight, (-1,), keepdim=True), group)
        scale = dispatch.scale_from_amax(amax, self.cast.fp8_format, self.cast.policy)
        return dispatch.quantize(weight, scale, self.cast.fp8_format), scale

    def to_wire(
        self, shard: torch.Tensor, state: WeightState, world_size: int
    ) -> tuple[tuple[torch.Tensor, ...], torch.Tensor | None]:
        """Return codes and scales as two buffers; keep the scales on one rank, where FSDP2 passes on one buffer."""
        if not _scales_travel(state):
            whole = state.agreed_scale
            scale = whole if state.shard_dim == shard.ndim - 1 else own_part(whole, shard, state)
            return wire_of(dispatch.quantize(shard, scale, self.cast.fp8_format), state), whole
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


def _scales_travel(state: WeightState) -> bool:
    """Whether each rank scales its rows alone and sends the scales: whole rows, and buffers that FSDP2 only joins."""
    return state.shard_dim == 0 and not state.splits_rows
