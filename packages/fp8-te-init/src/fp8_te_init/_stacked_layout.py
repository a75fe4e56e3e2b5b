"""How the scales of a primary weight lie: for stacked weights [experts, rows, columns] those of each expert alone."""

import torch

from fp8_common import CastRecipe
from fp8_common.torch.plugin import ScaleLayout


def layout_of(cast: CastRecipe, full_shape: torch.Size) -> ScaleLayout:
    """Return the layout of the scales of a whole weight of two or three dimensions."""
    return ScaleLayout.of(cast, stacked=len(full_shape) > 2)
