"""`Slot`: one weight whose scales the ranks agree on, and what is done for all weights of a model at once.

On a GPU a launch per weight costs more than the work. Weights that have a single scale share one launch for all amax
and one for all casts of a format; others go one by one.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from fp8_common import Format, Fp8StaleError
from fp8_common.torch import casts, foreach
from fp8_common.torch_layers.sharding.fsdp import Shard, check_gathers, pad_rows
from fp8_common.torch_layers.sharding.scale_grid import Region
from fp8_torch_fsdp.scales.delayed import in_use
from fp8_torch_fsdp.scales.weight_cast import WeightCast


class Sent:
    """What one rank sends of a weight in one forward, and the scales that go with it.

    Args:
        slot: The weight.
        number: A number and its int64 scalar on the CPU; no codes of other values have the same.
        codes: uint8, codes of `padded_shape`, and of MX their scales, where the part is; none in compiled graphs.
    """

    __slots__ = ("codes", "mark", "number", "own_bits", "scale", "scale_inv")

    def __init__(self, slot: "Slot", number: tuple[int, torch.Tensor], codes: tuple[torch.Tensor, ...]) -> None:
        (self.number, self.mark), self.codes = number, codes
        self.scale, self.scale_inv, self.own_bits = slot.scale, slot.scale_inv, slot.own_bits


_numbers = itertools.count(1)


def next_number() -> tuple[int, torch.Tensor]:
    """Return a new number for codes."""
    number = next(_numbers)
    return number, torch.tensor(number)


class Slot:
    """One weight, of which this rank holds a part.

    Args:
        name: Its name from the root.
        cast: How it is scaled.
        read: Returns the plain part that this rank holds, as it is now.
        region: Which part that is.
        padded_shape: Shape of every rank's contribution to the all-gather.
        device: Where it is gathered, and where the ranks agree.
        shard: FSDP2's view of it; None under `fully_shard_traceable`, which casts and gathers in its graphs.

    Attributes:
        part: What `read` returned at the last look.
        is_static: Whether its scale is a constant, or travels with the codes, so that there is nothing to agree on.
        scale: float32 scales into FP8 of the whole weight that the ranks agreed on last; empty of MX.
        scale_inv: The same back from FP8.
        own_bits: int32 [k], the amax bits of this rank's part at that time.
        bits: int32 [k], those of the whole weight.
        newest: What this rank sends, as the ranks agreed last; None before.
        number: Number of the codes that FSDP2 holds gathered or gathers now.
        mark: The same as an int64 scalar on the CPU.
        writes: How many writes to the part had been seen when it was cast.
        casts: How often the part was cast.
        sync: The `ScaleSync` that it belongs to.
    """

    def __init__(
        self,
        name: str,
        cast: WeightCast,
        read: Callable[[], torch.Tensor],
        region: Region,
        padded_shape: torch.Size,
        device: torch.device,
        shard: Shard | None = None,
    ) -> None:
        self.name, self.cast, self.region, self.padded_shape, self.device = name, cast, region, padded_shape, device
        self.shard, self._read, self.part = shard, read, read()
        self.is_mx = cast.grid.is_mx
        self.is_static = cast.grid.cast.static_scale is not None or self.is_mx
        self.scale, self.scale_inv = self._first_scales()
        self.own_bits = self.bits = torch.zeros(0, dtype=torch.int32, device=device)
        self.newest: Sent | None = None
        self.number, self.mark = 0, torch.tensor(0)
        self.writes = self.casts = 0
        self.sync: Any = None

    def look(self) -> None:
        """Take the part as it is now.

        Raises:
            Fp8Error: It has another dtype than when it was gathered first.
        """
        before, self.part = self.part.dtype, self._read()
        if self.shard is None:
            self.device = self.part.device  # a traceable model may have left the meta device
        elif self.part.dtype != before:
            check_gathers([self.shard])
        if self.scale.device != self.device:
            self.scale, self.scale_inv = self._first_scales()

    @property
    def is_kept(self) -> bool:
        """Whether FSDP2 holds the newest codes gathered, and was told not to reshard them."""
        return self.shard is not None and self.shard.stays_gathered and self.number == getattr(self.newest, "number", 0)

    def take(self, sent: "Sent") -> None:
        """Let scales and `own_bits` be those of another forward: compiled graphs read them."""
        self.scale, self.scale_inv, self.own_bits = sent.scale, sent.scale_inv, sent.own_bits

    def _first_scales(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the constant scales of the recipe, or 1 until the ranks have agreed."""
        constant = self.cast.grid.cast.static_scale
        shape = torch.Size((0,)) if self.is_mx else self.cast.grid.shape(self.region.full_shape)
        scale = torch.full(shape, 1.0 if constant is None else constant, dtype=torch.float32, device=self.device)
        return scale, casts.reciprocal(scale)

    def group(self, *, replicas: bool) -> dist.ProcessGroup | None:
        """Return the ranks that agree on its scales; `replicas` includes those that hold copies (HSDP)."""
        return None if self.shard is None else self.shard.group(self.cast.grid, replicas=replicas)

    def amax_bits(self) -> torch.Tensor:
        """Return the int32 amax bits [k] of the part, where the ranks agree."""
        return self.cast.grid.amax_bits(self.part, self.region).to(self.device, non_blocking=True)

    def quantized(self, part: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the uint8 codes of `padded_shape` that this rank sends of `part`, and of MX their scales."""
        self.casts += 1
        grid = self.cast.grid
        if self.is_mx:
            made = casts.quantize_mx(part, grid.cast.fp8_format, grid.cast.policy.mx_mode)
            shapes = self.padded_shape, grid.shape(self.padded_shape)
            return tuple(pad_rows(one, shape) for one, shape in zip(made, shapes, strict=True))
        scale = self.scale.to(part.device)  # CPU offload keeps parts and what they send on the host
        return (pad_rows(grid.quantize_part(part, scale, self.region), self.padded_shape),)

    def cast_again(self, writes: int) -> None:
        """Cast a part that was written to since the forward of its root began, with the scales of before.

        Raises:
            Fp8StaleError: It has outgrown them.
        """
        # Bits of floats that are not negative compare like the floats. A smaller amax is no error: the scale holds it.
        self.look()
        if not self.is_static and (self.amax_bits() > self.bits).any():
            raise Fp8StaleError(
                f"{self.name} was changed inside of the forward of its FSDP root and has outgrown the scale that the "
                "ranks agreed on before. Change weights before the forward of the root."
            )
        self.writes = writes
        self.newest = Sent(self, next_number(), self.quantized(self.part))


def amax_bits(slots: Sequence[Slot]) -> list[torch.Tensor]:
    """Return the int32 amax bits [k] of each part, where the ranks agree; one launch for all that have one scale."""
    found: dict[Slot, torch.Tensor] = {}
    for own in foreach.alike(filter(_one_scale, slots), lambda slot: slot.part.device):
        bits = foreach.amax_bits([slot.part for slot in own])
        found |= zip(own, (one.to(own[0].device, non_blocking=True) for one in bits.split(1)), strict=True)
    nothing = torch.zeros(0, dtype=torch.int32)
    for slot in slots:
        if slot not in found:
            found[slot] = nothing.to(slot.device) if slot.is_static else slot.amax_bits()
    return [found[slot] for slot in slots]


def fill_scales(slots: Sequence[Slot], bits: Sequence[torch.Tensor]) -> None:
    """Take over agreed amax bits and the scales that follow; all weights of a rule in one batch."""
    for slot, own in zip(slots, bits, strict=True):
        slot.bits = own
    for group in foreach.alike((slot for slot in slots if not slot.is_static), _rule):
        recipe = group[0].cast.grid.cast
        amax = torch.cat([slot.bits for slot in group]).view(torch.float32)
        scales = casts.scale_from_amax(amax, recipe.fp8_format, recipe.policy)
        states = [slot.cast.delayed for slot in group if slot.cast.delayed is not None]
        if states:
            scales = in_use(states, scales)
        sizes = [slot.bits.numel() for slot in group]
        both = scales.split(sizes), casts.reciprocal(scales).split(sizes)
        for slot, scale, scale_inv in zip(group, *both, strict=True):
            slot.scale, slot.scale_inv = scale.view(slot.scale.shape), scale_inv.view(slot.scale.shape)


def _rule(slot: Slot) -> object:
    """Return what the scale of a weight depends on besides its amax and its history."""
    recipe, delayed = slot.cast.grid.cast, slot.cast.delayed
    return recipe.format, recipe.policy, None if delayed is None else delayed.must_fit


def quantize(slots: Sequence[Slot]) -> None:
    """Make what this rank sends of all weights; one launch for all that have one scale of a format."""
    made: dict[Slot, tuple[torch.Tensor, ...]] = {}
    # In the graphs of `fully_shard_traceable` the layers cast.
    here = [slot for slot in slots if slot.shard is not None]
    for own in foreach.alike(filter(_one_scale, here), lambda slot: (slot.cast.grid.cast.fp8_format, slot.part.device)):
        scales = torch.stack([slot.scale for slot in own]).to(own[0].part.device)
        fmt: Format = own[0].cast.grid.cast.fp8_format
        for slot, codes in zip(own, foreach.quantize([slot.part for slot in own], scales, fmt), strict=True):
            made[slot] = (pad_rows(codes, slot.padded_shape),)
            slot.casts += 1
    number = next_number()
    for slot in slots:
        codes = () if slot.shard is None else made.get(slot) or slot.quantized(slot.part)
        slot.newest = Sent(slot, number, codes)


def _one_scale(slot: Slot) -> bool:
    """Return whether a weight has one scale, which follows from its amax."""
    return slot.cast.grid.block is None and not slot.is_static
