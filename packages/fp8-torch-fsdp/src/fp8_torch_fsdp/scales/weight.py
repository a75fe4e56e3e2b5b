"""`Fp8Weight`: the state of one FP8 weight, and batched casts.

On a GPU a launch per weight costs more than the work. Weights that have a single scale share one launch for all amax
and one for all casts of a format; others go one by one.
"""

import copy
import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from fp8_common import Format, Fp8StaleError
from fp8_common.torch import casts, foreach
from fp8_common.torch.quantized import Quantized
from fp8_common.torch_layers.linear.operand import quantize_tensorwise
from fp8_common.torch_layers.sharding.agreement import max_over_ranks
from fp8_common.torch_layers.sharding.fsdp import Shard, check_gathers, pad_rows
from fp8_common.torch_layers.sharding.scale_grid import Region, ScaleGrid
from fp8_torch_fsdp.scales.delayed import DelayedScale, in_use


class Fp8Weight:
    """State of one FP8 weight: scaling and, once sharded, the local part.

    Its layer has it, and so have all tensors that alias the parameter.

    Args:
        grid: Where its scales lie, and the recipe of the cast.
        delayed: The state of delayed scaling that they come from; None for other scaling.
        made_of: The weight that this one was made of.

    Attributes:
        grid: As given.
        delayed: As given.
        made_of: Returns the source weight while it is alive.
        is_static: Whether its scale is a constant, or is sent with the codes, so that ranks need not agree.
        writes: How many operators have written to it. Only a gather inside of a root's forward looks at this.
        replaced_by: The call that replaced the parameter in the model by another; None before.
        stands: Whether the user has declared that it does not change (`weights_unchanged`).
        held: While it stands and is not sharded: its address and version, its codes, and itself.
        sync: The `ScaleSync` that it belongs to; None before `place`. The following attributes are set from then on.
        name: Its name from the root.
        region: Which part this rank holds.
        padded_shape: Shape of every rank's contribution to the all-gather.
        device: Where it is gathered, and where the ranks agree.
        shard: FSDP2's view of it; None under `fully_shard_traceable`, which casts and gathers in its graphs.
        part: The plain part that this rank holds, as of the last look.
        scale: float32 scales into FP8 of the whole weight that the ranks agreed on last; empty of MX.
        scale_inv: The same back from FP8.
        local_bits: int32 [k], the amax bits of this rank's part at that time.
        bits: int32 [k], of the whole weight.
        newest: This rank's codes with the last agreed scales; None before.
        number: Number of the codes that FSDP2 holds gathered or gathers now.
        mark: The same as an int64 scalar on the CPU.
        writes_cast: How many writes had been seen when it was cast.
        casts: How often the part was cast.
    """

    name: str
    region: Region
    padded_shape: torch.Size
    device: Any
    shard: Shard | None
    part: torch.Tensor
    scale: torch.Tensor
    scale_inv: torch.Tensor
    local_bits: torch.Tensor
    bits: torch.Tensor
    _read: Callable[[], torch.Tensor]

    def __init__(
        self, grid: ScaleGrid, delayed: DelayedScale | None = None, made_of: "Fp8Weight | None" = None
    ) -> None:
        self.grid, self.delayed = grid, delayed
        self.made_of: Callable[[], Fp8Weight | None] = (lambda: None) if made_of is None else weakref.ref(made_of)
        self.is_static = grid.cast.static_scale is not None or grid.is_mx
        self.writes = 0
        self.replaced_by: str | None = None
        self.declared_unchanged = False
        self.held: tuple[object, Quantized, torch.Tensor] | None = None
        self.sync: Any = None
        self.newest: CodeSnapshot | None = None
        self.number, self.mark = 0, torch.tensor(0)
        self.writes_cast = self.casts = 0

    def another(self) -> "Fp8Weight":
        """Return the state of a weight derived from this one."""
        return Fp8Weight(self.grid, self.delayed, self)

    def __deepcopy__(self, memo: dict) -> "Fp8Weight":
        """Copy the scaling only: the copied model agrees separately."""
        # with the memo: a `DelayedScale` is a submodule of the layer, and the copied layer has the same twin
        return Fp8Weight(self.grid, copy.deepcopy(self.delayed, memo))

    def whole(
        self,
        weight: torch.Tensor,
        *,
        record: bool,
        both: bool = False,
        group: dist.ProcessGroup | None = None,
        splits_rows: bool = False,
    ) -> Quantized:
        """Return float8 codes and scales of a whole weight, as gathered.

        Args:
            weight: The plain weight, or this rank's tensor-parallel part of it.
            record: Whether delayed scaling observes it.
            both: Whether its codes are wanted transposed, too.
            group: The ranks that hold the other parts.
            splits_rows: Whether the parts are cut along the last dimension.
        """
        grid, cast = self.grid, self.grid.cast
        region = Region.whole(weight.shape)
        if grid.block is None:
            # compiled, one launch writes the codes for the output and for the input's gradient
            both = both or (cast.scaling != "static" and casts.fuses(weight))
            return quantize_tensorwise(weight, cast, self.delayed, record=record, group=group, both=both)
        if self.delayed is not None:
            amax = grid.amax_bits(weight, region).view(torch.float32)
            scale = self.delayed.current(amax, record).view(grid.shape(weight.shape))
        elif cast.granularity == "rowwise" and splits_rows:
            (bits,), _ = max_over_ranks([grid.amax_bits(weight, region)], group)
            scale = grid.scales(bits, weight.shape)
        else:
            return grid.quantize_whole(weight, both=both)
        codes, fmt = casts.quantize(weight, scale, cast.fp8_format), cast.fp8_format
        return Quantized(codes, casts.reciprocal(scale), fmt, grid.tile, scale=scale)

    def place(
        self,
        name: str,
        read: Callable[[], torch.Tensor],
        region: Region,
        padded_shape: torch.Size,
        device: torch.device,
        shard: Shard | None = None,
    ) -> "Fp8Weight":
        """Record the local part, and return self.

        `read` returns the current part as a plain tensor.
        """
        self.name, self._read, self.region, self.padded_shape, self.device = name, read, region, padded_shape, device
        self.shard, self.part = shard, read()
        self.scale, self.scale_inv = self._first_scales()
        self.local_bits = self.bits = torch.zeros(0, dtype=torch.int32, device=device)
        self.newest = None
        return self

    def look(self) -> None:
        """Read the current part.

        Raises:
            Fp8Error: It has another dtype than when it was gathered first.
        """
        before, self.part = self.part.dtype, self._read()
        if self.shard is None:
            self.device = self.part.device  # a traceable model may have left the meta device
        else:
            if self.part.dtype != before:
                check_gathers([self.shard])
            if (other := self.shard.local.fp8_weight) is not self:
                # `to_empty` creates a tensor with a new `Fp8Weight`; its aliases must share this one
                other.__dict__ = self.__dict__
                self.shard.local.fp8_weight = self
        self.writes_cast = self.writes
        if self.scale.device != self.device:
            self.scale, self.scale_inv = self._first_scales()

    @property
    def is_kept(self) -> bool:
        """True if FSDP2 holds the newest codes gathered without resharding."""
        return self.shard is not None and self.shard.stays_gathered and self.number == getattr(self.newest, "number", 0)

    @property
    def is_cast(self) -> bool:
        """True if an unchanged weight was cast since the window opened.

        Raises:
            Fp8StaleError: It was written to since, or another tensor was put in its place.
        """
        if self.newest is None:
            return False
        if self.writes != self.writes_cast or (self.shard is not None and self._read() is not self.part):
            raise Fp8StaleError(
                f"{self.name} was changed inside of weights_unchanged(model), in which it is not cast again. Change "
                "weights outside."
            )
        return True

    def take(self, sent: "CodeSnapshot") -> None:
        """Restore scales and `local_bits` of another forward.

        Compiled graphs read them.
        """
        self.scale, self.scale_inv, self.local_bits = sent.scale, sent.scale_inv, sent.local_bits

    def _first_scales(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the recipe's constant scales, or 1 until ranks agree."""
        constant = self.grid.cast.static_scale
        shape = torch.Size((0,)) if self.grid.is_mx else self.grid.shape(self.region.full_shape)
        scale = torch.full(shape, 1.0 if constant is None else constant, dtype=torch.float32, device=self.device)
        return scale, casts.reciprocal(scale)

    def group(self, *, replicas: bool) -> dist.ProcessGroup | None:
        """Return the ranks that agree on its scales.

        `replicas` includes ranks with copies (HSDP).
        """
        return None if self.shard is None else self.shard.group(self.grid, replicas=replicas)

    def amax_bits(self) -> torch.Tensor:
        """Return the part's int32 amax bits [k] for the agreement."""
        return self.grid.amax_bits(self.part, self.region).to(self.device, non_blocking=True)

    def quantized(self, part: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return `part`'s uint8 codes of `padded_shape`, and scales of MX."""
        self.casts += 1
        grid = self.grid
        if grid.is_mx:
            codes = casts.quantize_mx(part, grid.cast.fp8_format, grid.cast.policy.mx_mode)
            shapes = self.padded_shape, grid.shape(self.padded_shape)
            return tuple(pad_rows(tensor, shape) for tensor, shape in zip(codes, shapes, strict=True))
        scale = self.scale.to(part.device)  # CPU offload keeps parts and their codes on the host
        return (pad_rows(grid.quantize_part(part, scale, self.region), self.padded_shape),)

    def cast_again(self) -> None:
        """Cast a part written during the root's forward, with unchanged scales.

        Raises:
            Fp8StaleError: It has outgrown them.
        """
        # Bits of floats that are not negative compare like the floats. A smaller amax is no error: the scale holds it.
        self.refresh_part()
        if not self.is_static and (self.amax_bits() > self.bits).any():
            raise Fp8StaleError(
                f"{self.name} was changed inside of the forward of its FSDP root and has outgrown the scale that the "
                "ranks agreed on before. Change weights before the forward of the root."
            )
        self.newest = CodeSnapshot(self, next_number(), self.quantized(self.part))


class CodeSnapshot:
    """One rank's codes of a weight in one forward, with scales.

    Args:
        weight: The weight.
        number: A number and its int64 scalar on the CPU; no codes of other values have the same.
        codes: uint8, codes of `padded_shape`, and of MX their scales, where the part is; none in compiled graphs.
    """

    __slots__ = ("codes", "local_bits", "mark", "number", "scale", "scale_inv")

    def __init__(self, weight: Fp8Weight, number: tuple[int, torch.Tensor], codes: tuple[torch.Tensor, ...]) -> None:
        (self.number, self.mark), self.codes = number, codes
        self.scale, self.scale_inv, self.local_bits = weight.scale, weight.scale_inv, weight.local_bits


_numbers = itertools.count(1)


def next_number() -> tuple[int, torch.Tensor]:
    """Return a new number for codes."""
    number = next(_numbers)
    return number, torch.tensor(number)


def amax_bits(weights: Sequence[Fp8Weight]) -> list[torch.Tensor]:
    """Return int32 amax bits [k] of each part.

    One launch for all parts with one scale.
    """
    bits_of: dict[Fp8Weight, torch.Tensor] = {}
    for batch in foreach.alike(filter(_one_scale, weights), lambda weight: weight.part.device):
        bits = foreach.amax_bits([weight.part for weight in batch])
        bits_of |= zip(
            batch, (part_bits.to(batch[0].device, non_blocking=True) for part_bits in bits.split(1)), strict=True
        )
    nothing = torch.zeros(0, dtype=torch.int32)
    for weight in weights:
        if weight not in bits_of:
            bits_of[weight] = nothing.to(weight.device) if weight.is_static else weight.amax_bits()
    return [bits_of[weight] for weight in weights]


def fill_scales(weights: Sequence[Fp8Weight], bits: Sequence[torch.Tensor]) -> None:
    """Set agreed amax bits and their scales, batched by rule."""
    for weight, weight_bits in zip(weights, bits, strict=True):
        weight.bits = weight_bits
    for group in foreach.alike((weight for weight in weights if not weight.is_static), _rule):
        recipe = group[0].grid.cast
        amax = torch.cat([weight.bits for weight in group]).view(torch.float32)
        scales = casts.scale_from_amax(amax, recipe.fp8_format, recipe.policy)
        states = [weight.delayed for weight in group if weight.delayed is not None]
        if states:
            scales = in_use(states, scales)
        sizes = [weight.bits.numel() for weight in group]
        both = scales.split(sizes), casts.reciprocal(scales).split(sizes)
        for weight, scale, scale_inv in zip(group, *both, strict=True):
            weight.scale, weight.scale_inv = scale.view(weight.scale.shape), scale_inv.view(weight.scale.shape)


def _rule(weight: Fp8Weight) -> object:
    """Return the inputs of a scale besides amax and history."""
    recipe, delayed = weight.grid.cast, weight.delayed
    return recipe.format, recipe.policy, None if delayed is None else delayed.must_fit


def quantize(weights: Sequence[Fp8Weight]) -> None:
    """Cast all weights for the gather.

    One launch for all that have one scale of a format.
    """
    codes_of: dict[Fp8Weight, tuple[torch.Tensor, ...]] = {}
    # In the graphs of `fully_shard_traceable` the layers cast.
    here = [weight for weight in weights if weight.shard is not None and _one_scale(weight)]
    for batch in foreach.alike(here, lambda weight: (weight.grid.cast.fp8_format, weight.part.device)):
        scales = torch.stack([weight.scale for weight in batch]).to(batch[0].part.device)
        fmt: Format = batch[0].grid.cast.fp8_format
        for weight, codes in zip(batch, foreach.quantize([weight.part for weight in batch], scales, fmt), strict=True):
            codes_of[weight] = (pad_rows(codes, weight.padded_shape),)
            weight.casts += 1
    number = next_number()
    for weight in weights:
        codes = () if weight.shard is None else codes_of.get(weight) or weight.quantized(weight.part)
        weight.newest = CodeSnapshot(weight, number, codes)


def _one_scale(weight: Fp8Weight) -> bool:
    """Return whether a weight has one scale, which follows from its amax."""
    return weight.grid.block is None and not weight.is_static
