"""Tensorwise scaling of weights: one scale for the whole weight, which every rank knows before the gather."""

import dataclasses
from typing import ClassVar

import torch
import torch.distributed as dist

from fp8_common import Fp8Error
from fp8_common.torch.plugin import ShardGeometry, cast_tensorwise, dispatch, fsdp
from fp8_torch_fsdp._delayed import DelayedScale
from fp8_torch_fsdp._strategies.base import Strategy, WireBuffers, no_keys


@dataclasses.dataclass(frozen=True, kw_only=True)
class TensorwiseStrategy(Strategy):
    """Dynamic: the scale follows from the amax over all ranks."""

    shares_launches: ClassVar[bool] = True
    scale_follows_from_key: ClassVar[bool] = True

    def cast_whole(
        self, weight: torch.Tensor, *, record: bool, group: dist.ProcessGroup | None = None, splits_rows: bool = False
    ) -> dispatch.Cast:
        """Return codes of the shape of `weight` and the scalar scale."""
        # compiled, one launch writes what the output and the gradient of the input need
        return cast_tensorwise(weight, self.cast, None, record=record, group=group, both=dispatch.fused(weight))


@dataclasses.dataclass(frozen=True, kw_only=True)
class DelayedStrategy(TensorwiseStrategy):
    """Delayed: the scale follows from earlier steps; the amax of this step is only recorded."""

    delayed: DelayedScale

    scale_follows_from_key: ClassVar[bool] = False

    def scale_from_keys(self, keys: torch.Tensor, geometry: ShardGeometry) -> torch.Tensor | None:
        """Return the scale in use, the dynamic one in the first step."""
        # Not recorded here: `record` does that for the weights that training uses, synchronizations happen in
        # evaluation too.
        return self.delayed.current(self.layout.amax(keys, geometry.full_shape), record=False)

    def cast_whole(
        self, weight: torch.Tensor, *, record: bool, group: dist.ProcessGroup | None = None, splits_rows: bool = False
    ) -> dispatch.Cast:
        """Return codes of the shape of `weight` and the scale in use."""
        return cast_tensorwise(weight, self.cast, self.delayed, record=record, group=group)

    def record(self, keys: torch.Tensor) -> None:
        """Observe the weight's amax over all ranks."""
        self.delayed.observe(keys.view(torch.float32)[0])


@dataclasses.dataclass(frozen=True, kw_only=True)
class StaticStrategy(Strategy):
    """Static: the scale is a constant of the recipe; nothing is reduced."""

    def local_keys(self, shard: torch.Tensor, geometry: ShardGeometry) -> torch.Tensor:
        """Return no keys."""
        return no_keys(shard)

    def cast_whole(
        self, weight: torch.Tensor, *, record: bool, group: dist.ProcessGroup | None = None, splits_rows: bool = False
    ) -> dispatch.Cast:
        """Return codes of the shape of `weight` and the constant scale."""
        scale = self._constant(weight.device)
        return dispatch.Cast(dispatch.quantize(weight, scale, self.cast.fp8_format), scale, dispatch.reciprocal(scale))

    def to_wire(
        self, shard: torch.Tensor, geometry: ShardGeometry, scale: torch.Tensor | None, world_size: int
    ) -> WireBuffers:
        """Return the codes and the constant scale."""
        constant = self._constant(shard.device)
        codes = dispatch.quantize(shard, constant, self.cast.fp8_format)
        return (fsdp.pad_rows(codes, geometry.padded_shape),), constant

    def _constant(self, device: torch.device) -> torch.Tensor:
        if self.cast.static_scale is None:
            raise Fp8Error(f"StaticStrategy needs a cast with static_scale, got {self.cast}.")
        return torch.full((), self.cast.static_scale, dtype=torch.float32, device=device)
