"""`Fp8Weight`: the state of one FP8 weight, and batched casts.

On a GPU, a kernel launch per weight costs more time than the work of the kernel. Weights with a single scale share one
launch for all amax and one launch for all casts to a format; other weights are processed one by one.
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

    The layer and all tensors that alias the parameter hold the same object. The attributes from `name` to `bits` are
    set by `place`.

    Args:
        grid: Layout of the scales, and recipe of the cast.
        delayed: State of delayed scaling; None for other scaling.
        source: Weight that this one is a shard or a copy of.

    Attributes:
        grid: Layout of the scales, and recipe of the cast.
        delayed: State of delayed scaling; None for other scaling.
        source_ref: Function that returns the source, or None if there is none or it was freed.
        is_static: Whether ranks need not share amax: the scale is a constant, or is sent with the codes (MX).
        writes: Number of operators that have written to the weight. Checked by gathers during a forward of the root,
            and inside of `weights_unchanged`.
        replaced_by: Name of the call that replaced the parameter in the model, or None.
        declared_unchanged: Whether a `weights_unchanged` context is open for the weight.
        held_codes: Inside of `weights_unchanged`, for weights that are not gathered: the address and version of the
            weight, its codes, and the weight. None otherwise.
        sync: `ScaleSync` that holds the weight; None before sharded weights are gathered first.
        name: Name of the weight in the root.
        region: Part of the weight that this rank holds.
        padded_shape: Shape of each rank's contribution to the all-gather.
        device: Device of the gather and of the reduction of amax.
        shard: FSDP2's view of the weight; None under `fully_shard_traceable`, which casts and gathers in its graphs.
        part: Plain tensor of this rank's part, as of the last `refresh_part`.
        scale: float32 scales of the whole weight into FP8, as last shared by the ranks; empty for MX.
        scale_inv: float32 reciprocals of `scale`.
        local_bits: int32 [k], bits of the amax of this rank's part, from which `scale` was computed.
        bits: int32 [k], bits of the amax of the whole weight.
        newest: This rank's codes with the current scales; None before the first cast.
        number: Number of the codes that FSDP2 holds or gathers.
        mark: `number` as an int64 scalar on the CPU.
        writes_cast: Value of `writes` at the last cast.
        casts: Number of casts of the part.
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

    def __init__(self, grid: ScaleGrid, delayed: DelayedScale | None = None, source: "Fp8Weight | None" = None) -> None:
        self.grid, self.delayed = grid, delayed
        self.source_ref: Callable[[], Fp8Weight | None] = (lambda: None) if source is None else weakref.ref(source)
        self.is_static = grid.cast.static_scale is not None or grid.is_mx
        self.writes = 0
        self.replaced_by: str | None = None
        self.declared_unchanged = False
        self.held_codes: tuple[object, Quantized, torch.Tensor] | None = None
        self.sync: Any = None
        self.newest: CodeSnapshot | None = None
        self.number, self.mark = 0, torch.tensor(0)
        self.writes_cast = self.casts = 0

    def another(self) -> "Fp8Weight":
        """Return the state of a shard or a copy of this weight."""
        return Fp8Weight(self.grid, self.delayed, self)

    def __deepcopy__(self, memo: dict) -> "Fp8Weight":
        """Copy the scaling only; a copied model gets another sync."""
        # With the memo: the `DelayedScale` is also a submodule of the layer, which is copied once.
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
        """Cast a whole weight with scales computed from its current values.

        Codes and scales equal those of an FP8 all-gather of the weight.

        Args:
            weight: Plain weight, or this rank's tensor-parallel part of it.
            record: Whether delayed scaling observes the weight.
            both: Whether to also cast the transpose, if one launch can write both.
            group: Ranks that hold the other parts; None for a whole weight.
            splits_rows: Whether the parts are cut along the last dimension.
        """
        grid, cast = self.grid, self.grid.cast
        region = Region.whole(weight.shape)
        if grid.block is None:
            # In compiled code, one launch writes the codes for the output and for the input's gradient.
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
        """Set the local part of a sharded weight, and return self.

        Args:
            name: Name of the weight in the root.
            read: Function that returns the current part as a plain tensor.
            region: Part of the weight that this rank holds.
            padded_shape: Shape of each rank's contribution to the all-gather.
            device: Device of the gather.
            shard: FSDP2's view of the weight, or None.
        """
        self.name, self._read, self.region, self.padded_shape, self.device = name, read, region, padded_shape, device
        self.shard, self.part = shard, read()
        self.scale, self.scale_inv = self._first_scales()
        self.local_bits = self.bits = torch.zeros(0, dtype=torch.int32, device=device)
        self.newest = None
        return self

    def refresh_part(self) -> None:
        """Read the current part, which loading and `to_empty` replace.

        Raises:
            Fp8Error: If its dtype differs from the one of the first gather.
        """
        before, self.part = self.part.dtype, self._read()
        if self.shard is None:
            self.device = self.part.device  # the model may have left the meta device
        else:
            if self.part.dtype != before:
                check_gathers([self.shard])
            if (other := self.shard.local.fp8_weight) is not self:
                # `to_empty` creates a tensor with a new `Fp8Weight`; both objects must have the same state.
                other.__dict__ = self.__dict__
                self.shard.local.fp8_weight = self
        self.writes_cast = self.writes
        if self.scale.device != self.device:
            self.scale, self.scale_inv = self._first_scales()

    @property
    def is_kept(self) -> bool:
        """True if FSDP2 keeps the newest codes gathered, without resharding."""
        return self.shard is not None and self.shard.stays_gathered and self.number == getattr(self.newest, "number", 0)

    @property
    def is_cast(self) -> bool:
        """True if it was cast since its `weights_unchanged` context opened.

        Raises:
            Fp8StaleError: If the weight was modified or replaced after that cast.
        """
        if self.newest is None:
            return False
        if self.writes != self.writes_cast or (self.shard is not None and self._read() is not self.part):
            raise Fp8StaleError(
                f"{self.name} was modified inside of weights_unchanged(model), where it is not cast again. Modify "
                "weights outside of the context."
            )
        return True

    def restore_scales(self, snapshot: "CodeSnapshot") -> None:
        """Restore scales and `local_bits` of another forward, which compiled graphs read."""
        self.scale, self.scale_inv, self.local_bits = snapshot.scale, snapshot.scale_inv, snapshot.local_bits

    def _first_scales(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return constant scales of the recipe, or 1.0 before the first reduction."""
        constant = self.grid.cast.static_scale
        shape = torch.Size((0,)) if self.grid.is_mx else self.grid.shape(self.region.full_shape)
        scale = torch.full(shape, 1.0 if constant is None else constant, dtype=torch.float32, device=self.device)
        return scale, casts.reciprocal(scale)

    def group(self, *, replicas: bool) -> dist.ProcessGroup | None:
        """Return the ranks that share the scales of the weight.

        `replicas` includes the ranks that hold copies (HSDP).
        """
        return None if self.shard is None else self.shard.group(self.grid, replicas=replicas)

    def amax_bits(self) -> torch.Tensor:
        """Return int32 [k], bits of the amax of this rank's part."""
        return self.grid.amax_bits(self.part, self.region).to(self.device, non_blocking=True)

    def quantized(self, part: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Cast `part` to uint8 codes of `padded_shape`; MX scales follow the codes."""
        self.casts += 1
        grid = self.grid
        if grid.is_mx:
            codes = casts.quantize_mx(part, grid.cast.fp8_format, grid.cast.policy.mx_mode)
            shapes = self.padded_shape, grid.shape(self.padded_shape)
            return tuple(pad_rows(tensor, shape) for tensor, shape in zip(codes, shapes, strict=True))
        scale = self.scale.to(part.device)  # under CPU offload, parts and their codes are on the host
        return (pad_rows(grid.quantize_part(part, scale, self.region), self.padded_shape),)

    def cast_again(self) -> None:
        """Cast a part modified during the root's forward, with the same scales.

        Raises:
            Fp8StaleError: If an amax exceeds the one of its scale.
        """
        self.refresh_part()
        # Bits of non-negative floats compare like the floats. A smaller amax is no error: its values do not saturate.
        if not self.is_static and (self.amax_bits() > self.bits).any():
            raise Fp8StaleError(
                f"{self.name} was modified during the forward of its FSDP root and no longer fits the scale that was "
                "computed before that forward. Modify weights before calling the root."
            )
        self.newest = CodeSnapshot(self, next_number(), self.quantized(self.part))


class CodeSnapshot:
    """This rank's codes of a weight in one forward, with scales.

    Args:
        weight: Weight, whose current scales and `local_bits` are kept.
        number: Number that codes of other values do not have, as an int and as an int64 scalar on the CPU.
        codes: uint8 codes of `padded_shape`, for MX followed by their scales, on the device of the part. Empty under
            `fully_shard_traceable`, which casts in its graphs.
    """

    __slots__ = ("codes", "local_bits", "mark", "number", "scale", "scale_inv")

    def __init__(self, weight: Fp8Weight, number: tuple[int, torch.Tensor], codes: tuple[torch.Tensor, ...]) -> None:
        (self.number, self.mark), self.codes = number, codes
        self.scale, self.scale_inv, self.local_bits = weight.scale, weight.scale_inv, weight.local_bits


_numbers = itertools.count(1)


def next_number() -> tuple[int, torch.Tensor]:
    """Return an unused number for codes, as int and as tensor."""
    number = next(_numbers)
    return number, torch.tensor(number)


def amax_bits(weights: Sequence[Fp8Weight]) -> list[torch.Tensor]:
    """Return int32 amax bits [k] of this rank's part of each weight.

    All parts with a single scale share one launch. Weights whose ranks need not share amax have k = 0.
    """
    bits_of: dict[Fp8Weight, torch.Tensor] = {}
    for batch in foreach.alike(filter(_one_scale, weights), lambda weight: weight.part.device):
        bits = foreach.amax_bits([weight.part for weight in batch])
        bits_of |= zip(
            batch, (part_bits.to(batch[0].device, non_blocking=True) for part_bits in bits.split(1)), strict=True
        )
    empty = torch.zeros(0, dtype=torch.int32)
    for weight in weights:
        if weight not in bits_of:
            bits_of[weight] = empty.to(weight.device) if weight.is_static else weight.amax_bits()
    return [bits_of[weight] for weight in weights]


def fill_scales(weights: Sequence[Fp8Weight], bits: Sequence[torch.Tensor]) -> None:
    """Set the reduced amax bits of weights; compute their scales in batches."""
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
        scales_of_weights = scales.split(sizes), casts.reciprocal(scales).split(sizes)
        for weight, scale, scale_inv in zip(group, *scales_of_weights, strict=True):
            weight.scale, weight.scale_inv = scale.view(weight.scale.shape), scale_inv.view(weight.scale.shape)


def _rule(weight: Fp8Weight) -> object:
    """Return the parameters of a weight's scale rule, the key of batches."""
    recipe, delayed = weight.grid.cast, weight.delayed
    return recipe.format, recipe.policy, None if delayed is None else delayed.must_fit


def quantize(weights: Sequence[Fp8Weight]) -> None:
    """Cast all weights for the gather.

    All weights with a single scale and the same format share one launch.
    """
    codes_of: dict[Fp8Weight, tuple[torch.Tensor, ...]] = {}
    # Under `fully_shard_traceable`, the layers cast in their graphs.
    batchable = [weight for weight in weights if weight.shard is not None and _one_scale(weight)]
    for batch in foreach.alike(batchable, lambda weight: (weight.grid.cast.fp8_format, weight.part.device)):
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
    """Return whether a weight has a single scale, computed from its amax."""
    return weight.grid.block is None and not weight.is_static
