"""How the scales of a primary weight lie: for stacked weights [experts, rows, columns] those of each expert alone."""

import dataclasses

import torch

from fp8_common import CastRecipe
from fp8_common.torch.plugin import ScaleLayout, ShardGeometry, dispatch


def layout_of(cast: CastRecipe, full_shape: torch.Size) -> ScaleLayout:
    """Return the layout of the scales of a whole weight of two or three dimensions.

    Those of rows and blocks are each expert's own already.
    """
    if len(full_shape) > 2 and cast.granularity == "tensorwise":
        return StackedTensorwiseLayout(cast)
    return ScaleLayout.of(cast)


class StackedTensorwiseLayout(ScaleLayout):
    """One scale for each expert: float32 [experts, 1, 1]."""

    def __init__(self, cast: CastRecipe) -> None:
        super().__init__(cast)
        # Each expert is one row of [experts, rows * columns].
        self._flat = ScaleLayout.of(dataclasses.replace(cast, granularity="rowwise"))

    def shape(self, full_shape: torch.Size) -> tuple[int, ...]:
        """Return (experts, 1, 1)."""
        return (full_shape[0], *(1 for _ in full_shape[1:]))

    def keys(self, part: torch.Tensor, geometry: ShardGeometry) -> torch.Tensor:
        """Return a key for each expert of the whole weight."""
        flat = dataclasses.replace(geometry, full_shape=_flat_shape(geometry.full_shape))
        return self._flat.keys(part.reshape(_flat_shape(part.shape)), flat)

    def of_part(self, scales: torch.Tensor, part_shape: torch.Size, geometry: ShardGeometry) -> torch.Tensor:
        """Return the scales of the part's experts."""
        return geometry.part_of(scales, part_shape[0])

    def cast_whole(self, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return codes and scales [experts, 1, 1]."""
        codes, scales = dispatch.quantize_rowwise(weight.reshape(_flat_shape(weight.shape)), self.fmt, self.cast.policy)
        return codes.view(weight.shape), scales.view(self.shape(weight.shape))


def _flat_shape(shape: torch.Size) -> torch.Size:
    return torch.Size((shape[0], shape[1:].numel()))
