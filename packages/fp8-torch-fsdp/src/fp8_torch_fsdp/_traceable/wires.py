"""What a linear layer sends for its weight: FP8 codes and scales, or the weight in high precision.

Both make the same FP8 operand out of what arrives.
"""

import abc
import dataclasses
from collections.abc import Sequence

import torch

from fp8_common.torch.plugin import Operand, dispatch, fsdp
from fp8_torch_fsdp._stale_scales import nan_if_stale, tell_others_if_stale
from fp8_torch_fsdp._strategies import Strategy
from fp8_torch_fsdp._traceable.placement import Placement, pad
from fp8_torch_fsdp._weight_state import WeightState


@dataclasses.dataclass(frozen=True, kw_only=True)
class Wire(abc.ABC):
    """How one weight travels.

    Attributes:
        strategy: How the weight is scaled.
        place: Where the shards are.
        state: Its shapes, the scales that the ranks agreed on, and the keys that they were agreed for.
    """

    strategy: Strategy
    place: Placement
    state: WeightState

    @abc.abstractmethod
    def buffers(self, part: torch.Tensor) -> tuple[tuple[torch.Tensor, ...], torch.Tensor | None]:
        """Return what this rank sends for its rows `part`, and scales that every rank has already."""

    @abc.abstractmethod
    def operand(self, arrived: Sequence[torch.Tensor], kept: torch.Tensor | None, *, record: bool) -> Operand:
        """Return the whole weight as an FP8 operand."""


class Float8Wire(Wire):
    """FP8 codes, cast on the rank that holds the rows."""

    def buffers(self, part: torch.Tensor) -> tuple[tuple[torch.Tensor, ...], torch.Tensor | None]:
        """Return uint8 codes and, where they travel, scales.

        Raises:
            RuntimeError: The weight is not the one that its scale was made for; on a GPU its scale and the first row of
                codes are NaN then.
        """
        # The scale is read from the state at each call: in a compiled graph it is an input, not a constant.
        scale, keys, geometry = self.state.scale, self.state.keys, self.state.geometry
        if scale is None or keys is None or not keys.numel():
            return self.strategy.to_wire(part, geometry, scale, self.place.size)
        # The same amax on every rank is the same scale, so no change that matters escapes; the cast finds it in the
        # read that it needs anyway.
        codes, stale = self.strategy.layout.cast_and_compare(part, scale, keys, geometry)
        scale = nan_if_stale(
            scale,
            stale,
            # no name in here: blocks that differ in nothing but names share one graph
            f"The FP8 scale of a weight of shape {tuple(geometry.full_shape)} is stale: the weight changed since the "
            "last forward of the root. Call the module that fully_shard_traceable was applied to.",
        )
        tell_others_if_stale(codes, stale, self.strategy.cast.fp8_format)
        return (fsdp.pad_rows(codes, geometry.padded_shape),), scale

    def operand(self, arrived: Sequence[torch.Tensor], kept: torch.Tensor | None, *, record: bool) -> Operand:
        """Return the operand that shares the memory of what arrived."""
        shape = self.state.geometry.full_shape
        scale = self.strategy.scale_from_wire(tuple(arrived), kept, shape)
        codes = self.strategy.codes_from_wire(tuple(arrived), shape)
        return Operand(codes, dispatch.reciprocal(scale), self.strategy.cast.fp8_format, self.strategy.layout.block)


class PlainWire(Wire):
    """The weight as it is stored; every rank casts the whole of it."""

    def buffers(self, part: torch.Tensor) -> tuple[tuple[torch.Tensor, ...], torch.Tensor | None]:
        """Return the padded rows."""
        return (pad(part, self.state.geometry.padded_shape[0]).contiguous(),), None

    def operand(self, arrived: Sequence[torch.Tensor], kept: torch.Tensor | None, *, record: bool) -> Operand:
        """Return the operand, cast now."""
        # padding of all ranks is at the end
        weight = arrived[0][: self.state.geometry.full_shape[0]]
        made = self.strategy.cast_whole(weight, record=record)
        return Operand.of_cast(made, self.strategy.cast.fp8_format, self.strategy.layout.block)
