"""Scales of stacked and of transposed weights that the ranks agree on: one for each expert, or for each column.

Ranks that hold no part of an expert have no say in its scale. The keys of all experts travel in the one MAX all-reduce.
"""

import dataclasses
from typing import ClassVar

import torch
import torch.distributed as dist

from fp8_common.torch.plugin import ShardGeometry, dispatch
from fp8_torch_fsdp._strategies.base import Strategy
from fp8_torch_fsdp._strategies.tensorwise import DelayedStrategy


@dataclasses.dataclass(frozen=True, kw_only=True)
class StackedStrategy(Strategy):
    """Dynamic scales [experts, 1, 1] or [..., 1, out_features]."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StackedDelayedStrategy(DelayedStrategy):
    """Delayed scales [experts, 1, 1]: each expert has a history."""

    shares_launches: ClassVar[bool] = False

    def scale_from_keys(self, keys: torch.Tensor, geometry: ShardGeometry) -> torch.Tensor | None:
        """Return the scales in use, the dynamic ones in the first step."""
        scale = self.delayed.current(keys.view(torch.float32), record=False)
        return scale.view(self.layout.shape(geometry.full_shape))

    def cast_whole(
        self, weight: torch.Tensor, *, record: bool, group: dist.ProcessGroup | None = None, splits_rows: bool = False
    ) -> dispatch.Cast:
        """Return codes of the shape of `weight` and the scales in use."""
        keys = self.layout.keys(weight, ShardGeometry(full_shape=weight.shape))
        scale = self.delayed.current(keys.view(torch.float32), record).view(self.layout.shape(weight.shape))
        codes = dispatch.quantize(weight, scale, self.cast.fp8_format)
        return dispatch.Cast(codes, scale, dispatch.reciprocal(scale))

    def record(self, keys: torch.Tensor) -> None:
        """Observe the amax of each expert's weight over all ranks."""
        self.delayed.observe(keys.view(torch.float32))
