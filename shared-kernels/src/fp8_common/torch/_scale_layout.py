"""How the scales of a weight lie on it, also where a rank holds only a part: one number, one per row, one per block.

Stacked weights [experts, rows, columns] have for each expert the scales that its matrix would have alone. A weight that
is stored transposed, [..., in_features, out_features], has its "rows" along the last dimension.

A layout turns the part of a weight that a rank holds into integer keys whose MAX over ranks gives the scales of the
whole weight, and finds among these the scales of the part. Every rank can know all scales: at most 4 bytes for a row,
or for a block of 16,384 elements.
"""

import abc
import dataclasses

import torch
import torch.nn.functional as F

from fp8_common._blocks import Block, block_grid
from fp8_common._errors import Fp8Error
from fp8_common._recipe import CastRecipe
from fp8_common.torch import _dispatch as dispatch
from fp8_common.torch._amax import amax_over, float_key, key_to_float
from fp8_common.torch._quantize import Cast, block_amax, expand_blocks

BLOCK: Block = (128, 128)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ShardGeometry:
    """Which part of a weight a tensor is.

    Attributes:
        full_shape: Shape of the whole weight, [..., rows, columns].
        dim: The dimension along which the weight was cut.
        first_index: Index of the part's first element along `dim` in the whole weight.
        padded_shape: Shape of every rank's contribution to an all-gather, padding included.
        splits_rows: Whether the last dimension is cut, by FSDP2 or by tensor parallelism.
    """

    full_shape: torch.Size
    dim: int = 0
    first_index: int = 0
    padded_shape: torch.Size = torch.Size()
    splits_rows: bool = False

    def part_of(self, whole: torch.Tensor, length: int) -> torch.Tensor:
        """Return the part of `length` along `dim` of a tensor that is as long as the weight there.

        Padding past the end of the weight gets ones: it has no scale, and zeros stay zeros with any.
        """
        start = min(self.first_index, whole.shape[self.dim])
        present = min(length, whole.shape[self.dim] - start)
        part = whole.narrow(self.dim, start, present)
        if present == length:
            return part
        missing = list(part.shape)
        missing[self.dim] = length - present
        return torch.cat([part, part.new_ones(missing)], dim=self.dim)


class ScaleLayout(abc.ABC):
    """The scales of weights that are cast alike.

    Args:
        cast: Format, granularity and scale policy.
    """

    block: Block | None = None
    """The block of each scale, where scales do not broadcast to the weight."""

    def __init__(self, cast: CastRecipe) -> None:
        self.cast, self.fmt = cast, cast.fp8_format

    @staticmethod
    def of(cast: CastRecipe, *, stacked: bool = False, transposed: bool = False) -> "ScaleLayout":
        """Return how the scales of weights lie that are cast so.

        Args:
            cast: How the weights are cast.
            stacked: They are stacked [experts, rows, columns], and each expert is cast alone.
            transposed: They are stored as [..., in_features, out_features].

        Raises:
            Fp8Error: Weights are not cast with this granularity.
        """
        if stacked and cast.granularity == "tensorwise":
            return ExpertwiseLayout(cast)
        if transposed and cast.granularity == "rowwise":
            return ColumnwiseLayout(cast)
        if cast.granularity not in LAYOUTS:
            raise Fp8Error(
                f"Weights cannot be cast with {cast.scaling} {cast.granularity} scaling. Use one of "
                f"{', '.join(LAYOUTS)}."
            )
        return LAYOUTS[cast.granularity](cast)

    @abc.abstractmethod
    def shape(self, full_shape: torch.Size) -> tuple[int, ...]:
        """Return the shape of the scales of a whole weight."""

    @abc.abstractmethod
    def keys(self, part: torch.Tensor, geometry: ShardGeometry) -> torch.Tensor:
        """Return the int32 keys [k] of the absolute maxima of `part`, in the places that they have in the weight.

        k is the same for every part of a weight; keys are 0 where `part` has nothing. Their MAX over ranks is exact.
        """

    @abc.abstractmethod
    def of_part(self, scales: torch.Tensor, part_shape: torch.Size, geometry: ShardGeometry) -> torch.Tensor:
        """Return scales that broadcast to a part, of the float32 `scales` of the whole weight."""

    @abc.abstractmethod
    def cast_whole(self, weight: torch.Tensor) -> Cast:
        """Return float8 codes of the shape of `weight` and its scales, made from itself: amax and cast together."""

    def amax(self, keys: torch.Tensor, full_shape: torch.Size) -> torch.Tensor:
        """Return the float32 absolute maxima, of the shape of the scales, that reduced `keys` [k] stand for."""
        return key_to_float(keys).view(self.shape(full_shape))

    def scales(self, keys: torch.Tensor, full_shape: torch.Size) -> torch.Tensor:
        """Return the float32 scales of the whole weight from reduced `keys` [k]."""
        return dispatch.scale_from_amax(self.amax(keys, full_shape), self.fmt, self.cast.policy)

    def cast_part(self, part: torch.Tensor, scales: torch.Tensor, geometry: ShardGeometry) -> torch.Tensor:
        """Return float8 codes of a part, cast with the scales of the whole weight."""
        return dispatch.quantize(part, self.of_part(scales, part.shape, geometry), self.fmt)

    def cast_and_compare(
        self, part: torch.Tensor, scales: torch.Tensor, keys: torch.Tensor, geometry: ShardGeometry
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return `cast_part` and a bool scalar: whether the int32 `keys` [k] of the part are not `keys` any more.

        From one read of the part where that can be; changes that keep all scales may count as none.
        """
        return self.cast_part(part, scales, geometry), (self.keys(part, geometry) != keys).any()


class TensorwiseLayout(ScaleLayout):
    """One scale: a float32 scalar."""

    def shape(self, full_shape: torch.Size) -> tuple[int, ...]:
        """Return ()."""
        return ()

    def keys(self, part: torch.Tensor, geometry: ShardGeometry) -> torch.Tensor:
        """Return one key [1]."""
        return float_key(dispatch.amax(part)).reshape(1)

    def of_part(self, scales: torch.Tensor, part_shape: torch.Size, geometry: ShardGeometry) -> torch.Tensor:
        """Return the scalar."""
        return scales

    def cast_whole(self, weight: torch.Tensor) -> Cast:
        """Return codes and the scalar."""
        return dispatch.cast_tensorwise(weight, self.fmt, self.cast.policy, both=dispatch.fused(weight))

    def cast_and_compare(
        self, part: torch.Tensor, scales: torch.Tensor, keys: torch.Tensor, geometry: ShardGeometry
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return codes, and whether the amax that the cast finds has another key."""
        codes, amax, _ = dispatch.cast_with_amax(part, scales, self.fmt)
        return codes, (float_key(amax) != keys).any()


class RowwiseLayout(ScaleLayout):
    """One scale for each row: float32 [..., rows, 1]."""

    def shape(self, full_shape: torch.Size) -> tuple[int, ...]:
        """Return the shape of the weight with one column."""
        return (*full_shape[:-1], 1)

    def keys(self, part: torch.Tensor, geometry: ShardGeometry) -> torch.Tensor:
        """Return a key for each row of the whole weight."""
        keys = torch.zeros(self.shape(geometry.full_shape), dtype=torch.int32, device=part.device)
        if part.numel():
            own = float_key(amax_over(part, (-1,), keepdim=True))
            _rows_of(keys, part.shape, geometry).copy_(own)
        return keys.reshape(-1)

    def of_part(self, scales: torch.Tensor, part_shape: torch.Size, geometry: ShardGeometry) -> torch.Tensor:
        """Return the scales of the part's rows."""
        return _rows_of(scales, part_shape, geometry)

    def cast_whole(self, weight: torch.Tensor) -> Cast:
        """Return codes and scales [..., rows, 1]."""
        return dispatch.cast_rowwise(weight, self.fmt, self.cast.policy)


class ExpertwiseLayout(ScaleLayout):
    """One scale for each expert: float32 [experts, 1, 1]."""

    def shape(self, full_shape: torch.Size) -> tuple[int, ...]:
        """Return (experts, 1, 1)."""
        return (full_shape[0], *(1 for _ in full_shape[1:]))

    def keys(self, part: torch.Tensor, geometry: ShardGeometry) -> torch.Tensor:
        """Return a key for each expert of the whole weight."""
        keys = torch.zeros(self.shape(geometry.full_shape), dtype=torch.int32, device=part.device)
        if part.numel():
            own = float_key(amax_over(part, range(1, part.ndim), keepdim=True))
            self.of_part(keys, part.shape, geometry).copy_(own)
        return keys.reshape(-1)

    def of_part(self, scales: torch.Tensor, part_shape: torch.Size, geometry: ShardGeometry) -> torch.Tensor:
        """Return the scales of the part's experts; a part that is cut elsewhere has all."""
        return geometry.part_of(scales, part_shape[0]) if geometry.dim == 0 else scales

    def cast_whole(self, weight: torch.Tensor) -> Cast:
        """Return codes and scales [experts, 1, 1]."""
        # each expert is one row of [experts, rows * columns]
        rows = dispatch.cast_rowwise(weight.reshape(weight.shape[0], -1), self.fmt, self.cast.policy)
        shape = self.shape(weight.shape)
        return Cast(rows.codes.view(weight.shape), rows.scale.view(shape), rows.scale_inv.view(shape))


class ColumnwiseLayout(ScaleLayout):
    """One scale for each column, the output features of transposed weights: float32 [..., 1, columns]."""

    def shape(self, full_shape: torch.Size) -> tuple[int, ...]:
        """Return the shape of the weight with one row."""
        return (*full_shape[:-2], 1, full_shape[-1])

    def keys(self, part: torch.Tensor, geometry: ShardGeometry) -> torch.Tensor:
        """Return a key for each column of the whole weight."""
        keys = torch.zeros(self.shape(geometry.full_shape), dtype=torch.int32, device=part.device)
        if part.numel():
            own = float_key(amax_over(part, (-2,), keepdim=True))
            self.of_part(keys, part.shape, geometry).copy_(own)
        return keys.reshape(-1)

    def of_part(self, scales: torch.Tensor, part_shape: torch.Size, geometry: ShardGeometry) -> torch.Tensor:
        """Return the scales of the part's columns; a part of some rows has all."""
        return scales if geometry.dim == len(part_shape) - 2 else geometry.part_of(scales, part_shape[geometry.dim])

    def cast_whole(self, weight: torch.Tensor) -> Cast:
        """Return codes and scales [..., 1, columns]."""
        amax = amax_over(weight, (-2,), keepdim=True)
        scales = dispatch.scale_from_amax(amax, self.fmt, self.cast.policy)
        return Cast(dispatch.quantize(weight, scales, self.fmt), scales, dispatch.reciprocal(scales))


class BlockwiseLayout(ScaleLayout):
    """One scale for each block of 128x128 of the whole weight, however it is cut."""

    block = BLOCK

    def shape(self, full_shape: torch.Size) -> tuple[int, ...]:
        """Return the grid of blocks."""
        return block_grid(tuple(full_shape), BLOCK)

    def keys(self, part: torch.Tensor, geometry: ShardGeometry) -> torch.Tensor:
        """Return a key for each block of the whole weight; a block that spans parts gets one from each."""
        keys = torch.zeros(self.shape(geometry.full_shape), dtype=torch.int32, device=part.device)
        if part.numel():
            first, offset = self._first_block(part.ndim, geometry)
            if offset:  # zeros before the part: its first block then begins where the weight's does
                part = F.pad(part, (offset, 0) if geometry.dim == part.ndim - 1 else (0, 0, offset, 0))
            own = float_key(block_amax(part, BLOCK))
            keys.narrow(geometry.dim, first, own.shape[geometry.dim]).copy_(own)
        return keys.reshape(-1)

    def of_part(self, scales: torch.Tensor, part_shape: torch.Size, geometry: ShardGeometry) -> torch.Tensor:
        """Return a scale for each element of the part; only the blocks that the part touches are expanded."""
        dim, length = geometry.dim, part_shape[geometry.dim]
        first, offset = self._first_block(len(part_shape), geometry)
        unit = self._block_length(len(part_shape), dim)
        present = max(0, min(length, geometry.full_shape[dim] - geometry.first_index))
        # A part of nothing but padding touches no block, and may begin behind the last one.
        touched = scales.narrow(dim, min(first, scales.shape[dim]), -(-(offset + present) // unit) if present else 0)
        shape = list(part_shape)
        shape[dim] = offset + present if present else 0
        wide = expand_blocks(touched, BLOCK, torch.Size(shape)).narrow(dim, offset if present else 0, present)
        if present == length:
            return wide
        shape[dim] = length - present
        return torch.cat([wide, wide.new_ones(shape)], dim=dim)

    def cast_whole(self, weight: torch.Tensor) -> Cast:
        """Return codes and the scales of all blocks."""
        return dispatch.cast_blockwise(weight, self.fmt, BLOCK, self.cast.policy)

    def cast_and_compare(
        self, part: torch.Tensor, scales: torch.Tensor, keys: torch.Tensor, geometry: ShardGeometry
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return codes, and whether the part has other scales, or keys where it shares blocks with other parts."""
        dim, length = geometry.dim, part.shape[geometry.dim]
        first, offset = self._first_block(part.ndim, geometry)
        unit = self._block_length(part.ndim, dim)
        ends = length % unit == 0 or geometry.first_index + length == geometry.full_shape[dim]
        if offset or not ends or not length:
            return super().cast_and_compare(part, scales, keys, geometry)
        made = self.cast_whole(part)
        agreed = scales.narrow(dim, first, made.scale.shape[dim])
        # as bits: NaN is no change
        return made.codes, (made.scale.view(torch.int32) != agreed.contiguous().view(torch.int32)).any()

    def _first_block(self, ndim: int, geometry: ShardGeometry) -> tuple[int, int]:
        """Return the block that holds the part's first element along the cut, and that element's place in it."""
        return divmod(geometry.first_index, self._block_length(ndim, geometry.dim))

    def _block_length(self, ndim: int, dim: int) -> int:
        """Return how long a block is along a dimension; leading dimensions of stacked weights have no blocks."""
        return BLOCK[dim - ndim] if dim >= ndim - 2 else 1


LAYOUTS: dict[str, type[ScaleLayout]] = {
    "tensorwise": TensorwiseLayout,
    "rowwise": RowwiseLayout,
    "blockwise_128x128": BlockwiseLayout,
}
"""The granularities that weights are cast with."""


def _rows_of(rows: torch.Tensor, part_shape: torch.Size, geometry: ShardGeometry) -> torch.Tensor:
    """Return the entries of a part's rows of [..., rows, 1]; a part that is cut along the last dimension has all."""
    last = len(part_shape) - 1
    return rows if geometry.dim == last else geometry.part_of(rows, part_shape[geometry.dim])
