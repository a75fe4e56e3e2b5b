"""`Part`: cast, dtype, shape and first local row of a weight."""

import dataclasses

import torch

from fp8_common.torch_layers.sharding.scale_grid import Region, ScaleGrid


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """Identity of a weight and its local rows, independent of its values.

    Attributes:
        grid: Cast of the weight, and the positions of its scales.
        dtype: High-precision dtype of the weight: float32, bfloat16 or float16.
        full_shape: [rows, columns] of the whole weight.
        first_row: Index of the first row held here; None for a weight that is whole on each rank.
    """

    grid: ScaleGrid
    dtype: torch.dtype
    full_shape: torch.Size
    first_row: int | None = None

    @property
    def region(self) -> Region:
        """Region of the local rows in the whole weight."""
        return Region.along(0, self.first_row or 0, self.full_shape)
