"""Block-wise scaling of weights: one scale per 128x128 block of the whole weight, however it is sharded.

Shards are cut without regard to blocks, so a block may span ranks. Every rank contributes the amax of its part of each
block to the fused all-reduce and then knows all scales, which need not travel with the codes. Under tensor parallelism
each rank's part has blocks of its own.
"""

import dataclasses
from typing import ClassVar

from fp8_torch_fsdp._strategies.base import Strategy


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockwiseStrategy(Strategy):
    """Dynamic scales [ceil(rows / 128), ceil(columns / 128)]."""

    scales_each_part: ClassVar[bool] = True
