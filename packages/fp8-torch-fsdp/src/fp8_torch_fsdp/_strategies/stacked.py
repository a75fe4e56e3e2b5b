"""Scales of stacked and of transposed weights that the ranks agree on: one for each expert, or for each column.

Ranks that hold no part of an expert have no say in its scale. The keys of all experts travel in the one MAX all-reduce.
"""

import dataclasses

from fp8_torch_fsdp._strategies.base import Strategy


@dataclasses.dataclass(frozen=True, kw_only=True)
class StackedStrategy(Strategy):
    """Dynamic scales [experts, 1, 1] or [..., 1, out_features]."""
