"""FP8 communication between tensor-parallel ranks.

Codes are sent if one scale serves all uses, else values.

A matrix that is sharded along the sequence is cast before it is gathered, with the largest amax of all ranks, so that
the codes equal the whole matrix's. Recipes that cast a matrix twice, along its rows and along its columns, need the
values; for them torch's own gather runs.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate

from fp8_common.torch.quantized import Quantized
from fp8_common.torch_layers.sharding.gathered import GatheredWeight

Cast = Callable[[torch.Tensor], Quantized]
"""Quantizes a local matrix [rows, columns] with the scale that all ranks share."""


class ShardPlacement(NamedTuple):
    """Sharding of a tensor: ranks, placement, whole shape.

    The shape is None if all ranks hold equal parts.
    """

    mesh: DeviceMesh
    placement: Placement
    shape: torch.Size | None = None

    def distributed(self, local: torch.Tensor) -> DTensor:
        """Return the DTensor whose part on this rank is `local`."""
        # `from_local` takes shape and stride together; without them it multiplies the local shape, wrong for uneven
        # parts.
        stride = None if self.shape is None else torch.empty(self.shape, device="meta").stride()
        return DTensor.from_local(local, self.mesh, [self.placement], run_check=False, shape=self.shape, stride=stride)


def gather_codes(local: torch.Tensor, cast: Cast, place: ShardPlacement) -> GatheredWeight:
    """Return the whole tensor in FP8 from its parts.

    Args:
        local: [..., columns], float32, bfloat16 or float16.
        cast: How to cast it.
        place: How it is cut.
    """
    # A collective for scales of this step's values: all ranks come here in the same forward or backward.
    operand = cast(local.reshape(-1, local.shape[-1]))
    # as uint8, because gloo and older NCCL do not support float8
    data = place.distributed(operand.codes.view(local.shape).view(torch.uint8))
    whole = data.redistribute(placements=[Replicate()]).to_local()
    return GatheredWeight(
        whole.contiguous().view(operand.codes.dtype), operand.scale_inv, operand.fmt.name, local.dtype
    )


class GatherInput(torch.autograd.Function):
    """Gather an activation in FP8; reduce-scatter its gradients."""

    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, cast: Cast, place: ShardPlacement) -> DTensor:
        """Return a replicated DTensor over FP8 codes."""
        ctx.place = place
        return DTensor.from_local(gather_codes(local, cast, place), place.mesh, [Replicate()], run_check=False)

    @staticmethod
    def backward(ctx: Any, grad: DTensor) -> tuple[torch.Tensor | None, ...]:
        """Reduce and cut."""
        return grad.redistribute(placements=[ctx.place.placement]).to_local(), None, None


class ReduceOutput(torch.autograd.Function):
    """Sum partial outputs over ranks, whole or sharded.

    The gradient is gathered, in FP8 if `cast` is given.
    """

    @staticmethod
    def forward(
        ctx: Any, partial: torch.Tensor, cast: Cast | None, mesh: DeviceMesh, placement: Placement
    ) -> torch.Tensor:
        """Return this rank's part of the sum."""
        total = DTensor.from_local(partial.detach(), mesh, [Partial()], run_check=False)
        total = total.redistribute(placements=[placement])
        ctx.cast, ctx.place = cast, ShardPlacement(mesh, placement, total.shape)
        return total.to_local()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Gather; a replicated gradient is whole already."""
        if not ctx.place.placement.is_shard():
            whole = grad
        elif ctx.cast is None:
            whole = ctx.place.distributed(grad.contiguous()).redistribute(placements=[Replicate()]).to_local()
        else:
            whole = gather_codes(grad.contiguous(), ctx.cast, ctx.place)
        return whole, None, None, None
