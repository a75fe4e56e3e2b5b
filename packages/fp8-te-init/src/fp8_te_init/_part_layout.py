"""`PartLayout`: how the scales of a whole weight lie on the part of it that tensor parallelism gives to one rank.

Ranks keep the scales of the whole weight, which are the same everywhere and in every checkpoint; the part has those of
its own rows or blocks. FSDP2 may cut the part once more, by rows.
"""

import dataclasses

import torch

from fp8_common import CastRecipe, Fp8Error
from fp8_common.torch.plugin import ScaleLayout, ShardGeometry, dispatch
from fp8_te_init._stacked_layout import layout_of


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """What tensor parallelism gives to one rank.

    Attributes:
        whole: [rows, columns] of the whole weight.
        first: Indices of the part's first row and first column there.
    """

    whole: torch.Size
    first: tuple[int, int]


class PartLayout(ScaleLayout):
    """Scales of the whole weight, for parts of it.

    `full_shape` and `geometry` of its methods are those of the part, in which FSDP2 cuts rows.

    Args:
        cast: Format, granularity and scale policy.
        part: The part.
    """

    def __init__(self, cast: CastRecipe, part: Part) -> None:
        super().__init__(cast)
        self._inner, self._part = layout_of(cast, part.whole), part
        self.block = self._inner.block

    def shape(self, full_shape: torch.Size) -> tuple[int, ...]:
        """Return the shape of the scales of the whole weight."""
        return self._inner.shape(self._part.whole)

    def keys(self, part: torch.Tensor, geometry: ShardGeometry) -> torch.Tensor:
        """Return keys of the whole weight; 0 outside of the part."""
        keys = torch.zeros(self.shape(geometry.full_shape), dtype=torch.int32, device=part.device)
        own = self.own(keys, geometry.full_shape)
        own.copy_(self._inner.keys(part, geometry).view(own.shape))
        return keys.reshape(-1)

    def of_part(self, scales: torch.Tensor, part_shape: torch.Size, geometry: ShardGeometry) -> torch.Tensor:
        """Return scales that broadcast to rows of the part."""
        return self._inner.of_part(self.own(scales, geometry.full_shape), part_shape, geometry)

    def cast_whole(self, weight: torch.Tensor) -> dispatch.Cast:
        """Return codes and scales of a weight of its own."""
        return self._inner.cast_whole(weight)

    def own(self, scales: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        """Return the scales of the part [shape] among those of the whole weight: a view."""
        wanted = self._inner.shape(shape)
        for dim, length in enumerate(wanted):
            # a dimension without scales of its own has length 1 in both: it begins at 0
            first = min(self._part.first[dim] // self._unit(dim), scales.shape[dim] - length)
            scales = scales.narrow(dim, first, length)
        return scales

    def _unit(self, dim: int) -> int:
        return 1 if self.block is None else self.block[dim]


def check_blocks(cast: CastRecipe, dim: int, length: int, shape: torch.Size) -> None:
    """Refuse to cut a weight inside of the blocks of its scales.

    Args:
        cast: How it is cast.
        dim: The dimension that is cut.
        length: How long the parts are; the last ones may be shorter.
        shape: The whole weight.

    Raises:
        Fp8Error: The scales of a block would belong to two ranks, whose products need them whole.
    """
    block = layout_of(cast, shape).block
    if block is not None and length < shape[dim] and length % block[dim]:
        raise Fp8Error(
            f"Tensor parallelism would cut a weight {tuple(shape)} every {length} {('rows', 'columns')[dim]}, inside "
            f"of the {block[0]}x{block[1]} blocks of its scales. Use sizes that are multiples of {block[dim]} on each "
            'rank, or the recipes "tensorwise" or "rowwise".'
        )
