"""`ScaleGrid`: places of a weight's scales, whole and on a part.

A part is turned into integer amax bits, whose MAX over ranks gives the scales of the whole weight; of these the grid
finds the scales of the part. Every rank can know all scales: at most 4 bytes for a row, or for a block of 16,384
elements.
"""

import dataclasses

import torch
import torch.nn.functional as F

from fp8_common.errors import Fp8Error
from fp8_common.recipe import CastRecipe
from fp8_common.torch import casts
from fp8_common.torch.blocks import Block, block_amax, broadcasts, scale_shape
from fp8_common.torch.numerics import amax_bits
from fp8_common.torch.quantized import Quantized

BLOCKS: dict[str, Block] = {
    "tensorwise": None,
    "rowwise": (1, 0),
    "blockwise_128x128": (128, 128),
    "mx": casts.MX_BLOCK,
}
"""The granularities that weights are quantized with, for weights [..., out_features, in_features]."""


@dataclasses.dataclass(frozen=True, slots=True)
class Region:
    """Region of a tensor in a weight: begins at `offset`.

    Attributes:
        full_shape: Shape of the whole weight, [..., rows, columns].
        offset: Index of the part's first element in the whole weight, one number for each dimension. The offset of an
            empty part may lie behind the end.
    """

    full_shape: torch.Size
    offset: tuple[int, ...]

    @staticmethod
    def whole(shape: torch.Size) -> "Region":
        """Return the region of a tensor that is the whole weight."""
        return Region(shape, (0,) * len(shape))

    @staticmethod
    def along(dim: int, first: int, full_shape: torch.Size) -> "Region":
        """Return a part's region, sharded along one dimension from `first`."""
        return Region(full_shape, tuple(first if axis == dim else 0 for axis in range(len(full_shape))))


@dataclasses.dataclass(frozen=True)
class ScaleGrid:
    """The scales of equally quantized weights.

    Two grids are equal if they scale all weights in the same way.

    Args:
        cast: Format, granularity and scale policy.
        stacked: Weights are stacked [experts, rows, columns], and each expert has the scales that it would have alone.
        transposed: Weights are stored as [..., in_features, out_features]; their "rows" lie along the last dimension.

    Attributes:
        block: Elements per scale.
        is_mx: Whether scales are E8M0 codes, which are sent with their part: ranks agree on nothing.

    Raises:
        Fp8Error: Weights are not quantized with this granularity.
    """

    cast: CastRecipe
    stacked: bool = False
    transposed: bool = False
    block: Block = dataclasses.field(init=False)
    is_mx: bool = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        """Derive the others."""
        if self.cast.granularity not in BLOCKS:
            raise Fp8Error(
                f"Weights cannot be cast with {self.cast.scaling} {self.cast.granularity} scaling. Use one of "
                f"{', '.join(BLOCKS)}."
            )
        block = BLOCKS[self.cast.granularity]
        if block is None and self.stacked:
            block = (0, 0)
        if block is not None and self.transposed:
            block = block[::-1]
        object.__setattr__(self, "block", block)  # the dataclass is frozen
        object.__setattr__(self, "is_mx", self.cast.granularity == "mx")

    @property
    def tile(self) -> tuple[int, int] | None:
        """The block to repeat scales over, None if they broadcast."""
        return None if broadcasts(self.block) else self.block

    def divides(self, dim: int, ndim: int) -> bool:
        """Return whether parts sharded along `dim` have separate scales.

        Of a weight of `ndim` dimensions.
        """
        return self.block is not None and self._sides(ndim)[dim] > 0

    def shape(self, full_shape: torch.Size) -> torch.Size:
        """Return the shape of a whole weight's scales.

        () or the weight's shape, divided by the blocks.
        """
        return torch.Size(scale_shape(full_shape, self.block))

    def amax_bits(self, part: torch.Tensor, region: Region) -> torch.Tensor:
        """Return a part's amax bits, int32 [k], in the weight's places.

        Args:
            part: float16, bfloat16 or float32; may be empty.
            region: Which part it is.

        Returns:
            As many for every part of a weight, 0 where `part` has nothing. Their MAX over ranks is exact, NaN included.
        """
        if self.block is None:
            return amax_bits(casts.amax(part)).reshape(1)
        bits = torch.zeros(self.shape(region.full_shape), dtype=torch.int32, device=part.device)
        if part.numel():
            starts = [self._start(region.offset[dim], dim, part.ndim) for dim in range(part.ndim)]
            above, before = starts[-2][1], starts[-1][1]
            if above or before:  # zeros before the part: its first block then begins where the weight's does
                part = F.pad(part, (before, 0, above, 0))
            rows, columns = self.block
            own = amax_bits(block_amax(part, (rows or part.shape[-2], columns or part.shape[-1])))
            places = tuple(slice(first, first + n) for (first, _), n in zip(starts, own.shape, strict=True))
            bits[places] = own
        return bits.reshape(-1)

    def amax(self, bits: torch.Tensor, full_shape: torch.Size) -> torch.Tensor:
        """Return float32 amax, shaped like the scales, from `bits` [k].

        Reduced int32 bits.
        """
        return bits.view(torch.float32).view(self.shape(full_shape))

    def scales(self, bits: torch.Tensor, full_shape: torch.Size) -> torch.Tensor:
        """Return the whole weight's float32 scales from `bits` [k].

        Reduced int32 bits.
        """
        return casts.scale_from_amax(self.amax(bits, full_shape), self.cast.fp8_format, self.cast.policy)

    def of_part(self, scales: torch.Tensor, part_shape: torch.Size, region: Region) -> torch.Tensor:
        """Return scales that broadcast to a part.

        Of the `scales` of the whole weight, float32.

        A part may exceed the rest of the weight. That padding has scale 1: zeros stay zeros.
        """
        if self.block is None:
            return scales
        for dim, side in enumerate(self._sides(len(part_shape))):
            if side == 0:
                continue
            length, offset = part_shape[dim], region.offset[dim]
            present = max(0, min(length, region.full_shape[dim] - offset))
            first, inside = divmod(offset, side) if present else (0, 0)
            if (count := -(-(inside + present) // side)) != scales.shape[dim]:
                scales = scales.narrow(dim, first, count)
            if side > 1:
                scales = scales.repeat_interleave(side, dim).narrow(dim, inside, present)
            if present < length:
                padding = list(scales.shape)
                padding[dim] = length - present
                scales = torch.cat([scales, scales.new_ones(padding)], dim)
        return scales

    def quantize_part(self, part: torch.Tensor, scales: torch.Tensor, region: Region) -> torch.Tensor:
        """Return float8 codes of a part, with the whole weight's `scales`."""
        return casts.quantize(part, self.of_part(scales, part.shape, region), self.cast.fp8_format)

    def quantize_whole(self, weight: torch.Tensor, *, both: bool = False) -> Quantized:
        """Return float8 codes of `weight` and its own scales.

        `both`: whether the transposed codes are needed, too.
        """
        # compiled, one launch writes the operands of the output and of the input's gradient
        both = both or casts.fuses(weight)
        if both and self.block == (1, 0):
            return casts.quantize_turned_rows(weight, self.cast.fp8_format, self.cast.policy)
        both = both and self.block in (None, (128, 128))
        return casts.quantize_dynamic(weight, self.cast.fp8_format, self.cast.policy, self.block, both=both)

    def quantize_and_compare(
        self, part: torch.Tensor, scales: torch.Tensor, bits: torch.Tensor, region: Region
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return `quantize_part`, and whether the part's amax changed.

        A bool scalar: whether its amax bits differ from `bits` [k].

        A tensor with a single scale is read once.
        """
        if self.block is None:
            codes, amax = casts.quantize_with_amax(part, scales, self.cast.fp8_format)
            return codes, (amax_bits(amax) != bits).any()
        return self.quantize_part(part, scales, region), (self.amax_bits(part, region) != bits).any()

    def _sides(self, ndim: int) -> tuple[int, ...]:
        """Return block lengths by dimension.

        0 for a whole side, 1 for each expert.
        """
        if self.block is None:
            return (0,) * ndim
        return (*(1 for _ in range(ndim - 2)), *self.block)

    def _start(self, offset: int, dim: int, ndim: int) -> tuple[int, int]:
        """Return the block of element `offset` along `dim`, and its place."""
        side = self._sides(ndim)[dim]
        return divmod(offset, side) if side else (0, 0)
