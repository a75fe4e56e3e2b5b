"""`WeightCast`: how a weight is scaled: where its scales lie, and where they come from."""

import dataclasses

import torch
import torch.distributed as dist

from fp8_common import CastRecipe
from fp8_common.torch import casts
from fp8_common.torch.quantized import Quantized
from fp8_common.torch_layers.linear.operand import quantize_tensorwise
from fp8_common.torch_layers.sharding.agreement import max_over_ranks
from fp8_common.torch_layers.sharding.scale_grid import Region, ScaleGrid
from fp8_torch_fsdp.scales.delayed import DelayedScale


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class WeightCast:
    """How one weight is scaled.

    Attributes:
        grid: Where its scales lie, and the recipe of the cast.
        delayed: The state of delayed scaling that they come from; None for other scaling.
    """

    grid: ScaleGrid
    delayed: DelayedScale | None = None

    @classmethod
    def of(
        cls,
        cast: CastRecipe,
        *,
        stacked: bool = False,
        transposed: bool = False,
        delayed: DelayedScale | None = None,
    ) -> "WeightCast":
        """Return how weights are scaled that are cast so.

        Args:
            cast: Format, scaling, granularity and policy.
            stacked: The weight is [experts, ...], and each expert is cast alone.
            transposed: It is [..., in_features, out_features].
            delayed: The state of delayed scaling, where `cast.scaling` is "delayed", of each expert of a stack.

        Raises:
            Fp8Error: No weight is cast with this granularity.
        """
        # a constant is the scale of all experts
        grid = ScaleGrid(cast, stacked=stacked and cast.scaling != "static", transposed=transposed)
        return cls(grid=grid, delayed=delayed)

    def whole(
        self,
        weight: torch.Tensor,
        *,
        record: bool,
        both: bool = False,
        group: dist.ProcessGroup | None = None,
        splits_rows: bool = False,
    ) -> Quantized:
        """Return the float8 codes and the scales of a whole weight, the same numbers that a gather gives.

        Args:
            weight: The plain weight, or this rank's tensor-parallel part of it.
            record: Whether delayed scaling observes it.
            both: Whether its codes are wanted transposed, too.
            group: The ranks that hold the other parts.
            splits_rows: Whether the parts are cut along the last dimension.
        """
        grid, cast = self.grid, self.grid.cast
        region = Region.whole(weight.shape)
        if grid.block is None:
            # compiled, one launch writes what the output and the gradient of the input need
            both = both or (cast.scaling != "static" and casts.fuses(weight))
            return quantize_tensorwise(weight, cast, self.delayed, record=record, group=group, both=both)
        if self.delayed is not None:
            amax = grid.amax_bits(weight, region).view(torch.float32)
            scale = self.delayed.current(amax, record).view(grid.shape(weight.shape))
        elif cast.granularity == "rowwise" and splits_rows:
            (bits,), _ = max_over_ranks([grid.amax_bits(weight, region)], group)
            scale = grid.scales(bits, weight.shape)
        else:
            return grid.quantize_whole(weight, both=both)
        codes, fmt = casts.quantize(weight, scale, cast.fp8_format), cast.fp8_format
        return Quantized(codes, casts.reciprocal(scale), fmt, grid.tile, scale=scale)
