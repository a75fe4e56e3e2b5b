"""`ScaleGrid`: layout of scales on a weight and on its parts.

The grid reduces a part to int32 amax bits. The MAX of these bits over ranks gives the scales of the whole weight, from
which the grid selects the scales of the part. Every rank can hold all scales: they take at most 4 bytes for a row, or
for a block of 16,384 elements. MX scales are the exception: they are gathered with their part.
"""

import dataclasses

import torch
import torch.nn.functional as F

from fp8_common.errors import Fp8Error
from fp8_common.recipe import BLOCKS, CastRecipe
from fp8_common.torch import casts
from fp8_common.torch.blocks import Block, block_amax, broadcasts, scale_shape
from fp8_common.torch.numerics import amax_bits
from fp8_common.torch.quantized import Quantized

GRANULARITIES = ("tensorwise", "rowwise", "blockwise_128x128", "mx")
"""Supported granularities of weights [..., out_features, in_features]."""


@dataclasses.dataclass(frozen=True, slots=True)
class Region:
    """Position of a part in a weight.

    Attributes:
        full_shape: Shape of the whole weight, [..., rows, columns].
        offset: Index of the part's first element in the whole weight, one number for each dimension. The offset of an
            empty part may exceed the shape.
    """

    full_shape: torch.Size
    offset: tuple[int, ...]

    @staticmethod
    def whole(shape: torch.Size) -> "Region":
        """Return the region of a whole weight."""
        return Region(shape, (0,) * len(shape))

    @staticmethod
    def along(dim: int, first: int, full_shape: torch.Size) -> "Region":
        """Return the region of a part that begins at `first` along `dim`."""
        return Region(full_shape, tuple(first if axis == dim else 0 for axis in range(len(full_shape))))


@dataclasses.dataclass(frozen=True)
class ScaleGrid:
    """Layout of the scales of weights with the same cast.

    Equal grids scale all weights in the same way.

    Args:
        cast: Format, granularity and scale policy.
        stacked: Whether weights are stacks [experts, rows, columns], in which each expert has the scales that it would
            have alone.
        transposed: Whether weights are stored as [..., in_features, out_features]. A row-wise scale then belongs to an
            index of the last dimension.

    Attributes:
        block: Elements per scale, in the stored layout.
        is_mx: Whether scales are E8M0 codes, which are gathered with their part, so that ranks need not agree on them.

    Raises:
        Fp8Error: If weights cannot be quantized with this granularity.
    """

    cast: CastRecipe
    stacked: bool = False
    transposed: bool = False
    block: Block = dataclasses.field(init=False)
    is_mx: bool = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        """Derive `block` and `is_mx`."""
        if self.cast.granularity not in GRANULARITIES:
            raise Fp8Error(
                f"Weights cannot be cast with {self.cast.scaling} {self.cast.granularity} scaling. Use one of "
                f"{', '.join(GRANULARITIES)}."
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
        """Block over which scales are repeated; None if they broadcast."""
        return None if broadcasts(self.block) else self.block

    def divides(self, dim: int, ndim: int) -> bool:
        """Return whether parts sharded along `dim` have separate scales.

        `ndim` is the number of dimensions of the weight.
        """
        return self.block is not None and self._sides(ndim)[dim] > 0

    def shape(self, full_shape: torch.Size) -> torch.Size:
        """Return the shape of a whole weight's scales.

        It is () for a single scale, else the shape of the weight divided by the block.
        """
        return torch.Size(scale_shape(full_shape, self.block))

    def amax_bits(self, part: torch.Tensor, region: Region) -> torch.Tensor:
        """Return a part's amax bits, ordered like the whole weight's scales.

        Args:
            part: float16, bfloat16 or float32; may be empty.
            region: Position of the part in the weight.

        Returns:
            int32 [k], with the same k for all parts of a weight, and 0 for scales of which `part` has no elements. The
            MAX over ranks is exact, NaN included.
        """
        if self.block is None:
            return amax_bits(casts.amax(part)).reshape(1)
        bits = torch.zeros(self.shape(region.full_shape), dtype=torch.int32, device=part.device)
        if part.numel():
            starts = [self._start(region.offset[dim], dim, part.ndim) for dim in range(part.ndim)]
            above, before = starts[-2][1], starts[-1][1]
            if above or before:  # Zeros before the part align its blocks with the blocks of the weight.
                part = F.pad(part, (before, 0, above, 0))
            rows, columns = self.block
            part_bits = amax_bits(block_amax(part, (rows or part.shape[-2], columns or part.shape[-1])))
            places = tuple(slice(first, first + n) for (first, _), n in zip(starts, part_bits.shape, strict=True))
            bits[places] = part_bits
        return bits.reshape(-1)

    def amax(self, bits: torch.Tensor, full_shape: torch.Size) -> torch.Tensor:
        """Return the whole weight's float32 amax values, shaped like its scales.

        `bits` is int32 [k], the MAX of `amax_bits` over all parts.
        """
        return bits.view(torch.float32).view(self.shape(full_shape))

    def scales(self, bits: torch.Tensor, full_shape: torch.Size) -> torch.Tensor:
        """Return the whole weight's float32 scales into FP8.

        `bits` is int32 [k], the MAX of `amax_bits` over all parts.
        """
        return casts.scale_from_amax(self.amax(bits, full_shape), self.cast.fp8_format, self.cast.policy)

    def of_part(self, scales: torch.Tensor, part_shape: torch.Size, region: Region) -> torch.Tensor:
        """Return a part's scales, which broadcast to the part.

        Args:
            scales: float32 scales of the whole weight.
            part_shape: Shape of the part. It may exceed the weight: this padding gets scale 1, so zeros stay zeros.
            region: Position of the part in the weight.
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
        """Return the float8 codes of a part, given the whole weight's `scales`."""
        return casts.quantize(part, self.of_part(scales, part.shape, region), self.cast.fp8_format)

    def quantize_whole(self, weight: torch.Tensor, *, both: bool = False) -> Quantized:
        """Quantize a whole weight with scales from its amax.

        Args:
            weight: float16, bfloat16 or float32.
            both: Whether to also return the transposed codes, if kernels write both.
        """
        # In compiled code one launch writes the operands of two matmuls, for the output and for the input's gradient.
        both = both or casts.fuses(weight)
        if both and self.block == (1, 0):
            return casts.quantize_turned_rows(weight, self.cast.fp8_format, self.cast.policy)
        both = both and self.block in (None, (128, 128))
        return casts.quantize_dynamic(weight, self.cast.fp8_format, self.cast.policy, self.block, both=both)

    def quantize_and_compare(
        self, part: torch.Tensor, scales: torch.Tensor, bits: torch.Tensor, region: Region
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Quantize a part, and compare its amax bits with earlier ones.

        A part with a single scale is read once.

        Args:
            part: float16, bfloat16 or float32.
            scales: float32 scales of the whole weight.
            bits: int32 [k], earlier result of `amax_bits` for this part.
            region: Position of the part in the weight.

        Returns:
            The float8 codes of `quantize_part`, and a bool scalar that is True if any amax bits differ from `bits`.
        """
        if self.block is None:
            codes, amax = casts.quantize_with_amax(part, scales, self.cast.fp8_format)
            return codes, (amax_bits(amax) != bits).any()
        return self.quantize_part(part, scales, region), (self.amax_bits(part, region) != bits).any()

    def _sides(self, ndim: int) -> tuple[int, ...]:
        """Return the length of a block along each dimension.

        0 stands for the whole dimension. Dimensions before the matrix have 1.
        """
        if self.block is None:
            return (0,) * ndim
        return (*(1 for _ in range(ndim - 2)), *self.block)

    def _start(self, offset: int, dim: int, ndim: int) -> tuple[int, int]:
        """Return the block of element `offset` along `dim`, and its index inside."""
        side = self._sides(ndim)[dim]
        return divmod(offset, side) if side else (0, 0)
