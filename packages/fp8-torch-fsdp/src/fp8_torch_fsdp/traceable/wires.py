"""What a linear layer sends for its weight: FP8 codes, or the weight in high precision.

Both make the same FP8 operand out of what arrives.
"""

import abc
import dataclasses

import torch

from fp8_common.torch import torch_dtype
from fp8_common.torch.linear.operand import Operand
from fp8_common.torch.plugin import dispatch
from fp8_common.torch.sharding.fsdp import pad_rows, unpad
from fp8_torch_fsdp.scales.slot import Slot
from fp8_torch_fsdp.scales.stale import nan_if_stale, tell_others_if_stale
from fp8_torch_fsdp.traceable.placement import Placement, pad


@dataclasses.dataclass(frozen=True, kw_only=True)
class Wire(abc.ABC):
    """How one weight travels.

    Attributes:
        slot: Its shape, how it is scaled, and the scales that the ranks agreed on.
        place: Where the shards are.
    """

    slot: Slot
    place: Placement

    @abc.abstractmethod
    def send(self, part: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor]:
        """Return the scales that every rank has, None if there are none, and what this rank sends of its rows."""

    @abc.abstractmethod
    def operand(self, scale: torch.Tensor | None, arrived: torch.Tensor, *, record: bool) -> Operand:
        """Return the whole weight as an FP8 operand."""


class Float8Wire(Wire):
    """FP8 codes, cast on the rank that holds the rows."""

    def send(self, part: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor]:
        """Return the scales and uint8 codes.

        Raises:
            RuntimeError: The weight is not the one that its scale was made for; on a GPU its scale and the first row of
                codes are NaN then.
        """
        # The scale is read from the slot at each call: in a compiled graph it is an input, not a constant.
        slot, grid = self.slot, self.slot.cast.grid
        scale = slot.scale
        if not slot.own_bits.numel():  # a constant: nothing to compare
            return scale, pad_rows(grid.quantize_part(part, scale, slot.region), slot.padded_shape)
        # The same amax on every rank is the same scale, so no change that matters escapes; the cast finds it in the
        # read that it needs anyway.
        codes, stale = grid.quantize_and_compare(part, scale, slot.own_bits, slot.region)
        scale = nan_if_stale(
            scale,
            stale,
            # no name in here: blocks that differ in nothing but names share one graph
            f"The FP8 scale of a weight of shape {tuple(slot.region.full_shape)} is stale: the weight changed since "
            "the last forward of the root. Call the module that fully_shard_traceable was applied to.",
        )
        tell_others_if_stale(codes, stale, grid.cast.fp8_format)
        return scale, pad_rows(codes, slot.padded_shape)

    def operand(self, scale: torch.Tensor | None, arrived: torch.Tensor, *, record: bool) -> Operand:
        """Return the operand that shares the memory of what arrived."""
        grid = self.slot.cast.grid
        fmt = grid.cast.fp8_format
        codes = unpad(arrived, self.slot.region.full_shape, torch_dtype(fmt))
        return Operand(codes, dispatch.reciprocal(self.slot.scale if scale is None else scale), fmt, grid.tile)


class PlainWire(Wire):
    """The weight as it is stored; every rank casts the whole of it."""

    def send(self, part: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor]:
        """Return the padded rows."""
        return None, pad(part, self.slot.padded_shape[0]).contiguous()

    def operand(self, scale: torch.Tensor | None, arrived: torch.Tensor, *, record: bool) -> Operand:
        """Return the operand, cast now."""
        # padding of all ranks is at the end
        weight = arrived[: self.slot.region.full_shape[0]]
        cast = self.slot.cast
        made = cast.whole(weight, record=record)
        return Operand.of_cast(made, cast.grid.cast.fp8_format, cast.grid.tile)
