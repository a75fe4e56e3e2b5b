"""`Part`: which weight a state is of, and which of its rows."""

import dataclasses

import torch

from fp8_common.torch_layers.sharding.scale_grid import Region, ScaleGrid


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """Identity of a weight and its local rows, unchanged by writes.

    Attributes:
        grid: How the weight is cast, and where its scales lie.
        dtype: float32, bfloat16 or float16: the high-precision dtype of the weight.
        full_shape: [rows, columns] of the whole weight.
        first_row: Index of the first row that is held here; None for a weight that is whole on each rank.
    """

    grid: ScaleGrid
    dtype: torch.dtype
    full_shape: torch.Size
    first_row: int | None = None

    @property
    def region(self) -> Region:
        """Index of the first local row."""
        return Region.along(0, self.first_row or 0, self.full_shape)
