"""FP8 communication between tensor-parallel ranks.

A matrix that is sharded along the sequence is cast before it is gathered, with a scale computed from the largest amax
of all ranks, so that the codes equal those of the whole matrix. Recipes that cast a matrix along its rows and along its
columns need the values: for them torch gathers in high precision.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate

from fp8_common.torch.quantized import Quantized
from fp8_common.torch_layers.sharding.gathered import GatheredWeight

Cast = Callable[[torch.Tensor], Quantized]
"""Function that quantizes a local matrix [rows, columns] with a scale that all ranks share."""


class ShardPlacement(NamedTuple):
    """Sharding of a tensor.

    Attributes:
        mesh: Ranks.
        placement: How the tensor is sharded.
        shape: Shape of the whole tensor; None if all ranks hold parts of equal size.
    """

    mesh: DeviceMesh
    placement: Placement
    shape: torch.Size | None = None

    def distributed(self, local: torch.Tensor) -> DTensor:
        """Return the DTensor whose local part is `local`."""
        # `from_local` needs shape and stride for uneven parts, because without them it assumes equal ones.
        stride = None if self.shape is None else torch.empty(self.shape, device="meta").stride()
        return DTensor.from_local(local, self.mesh, [self.placement], run_check=False, shape=self.shape, stride=stride)


def gather_codes(local: torch.Tensor, cast: Cast, place: ShardPlacement) -> GatheredWeight:
    """Cast the local part of a tensor; gather the whole in FP8.

    Collective: all ranks of the mesh call it.

    Args:
        local: float32, bfloat16 or float16 [..., columns], this rank's part.
        cast: Cast of the part. It may reduce amax over the ranks.
        place: Sharding of the tensor.
    """
    operand = cast(local.reshape(-1, local.shape[-1]))
    # as uint8: gloo and older versions of NCCL do not support float8
    data = place.distributed(operand.codes.view(local.shape).view(torch.uint8))
    whole = data.redistribute(placements=[Replicate()]).to_local()
    return GatheredWeight(
        whole.contiguous().view(operand.codes.dtype), operand.scale_inv, operand.fmt.name, local.dtype
    )


class GatherInput(torch.autograd.Function):
    """Gathers an activation in FP8; the backward reduce-scatters its gradient."""

    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, cast: Cast, place: ShardPlacement) -> DTensor:
        """Return the whole activation, a replicated DTensor of a `GatheredWeight`."""
        ctx.place = place
        return DTensor.from_local(gather_codes(local, cast, place), place.mesh, [Replicate()], run_check=False)

    @staticmethod
    def backward(ctx: Any, grad: DTensor) -> tuple[torch.Tensor | None, ...]:
        """Return this rank's part of the reduced gradient."""
        return grad.redistribute(placements=[ctx.place.placement]).to_local(), None, None


class ReduceOutput(torch.autograd.Function):
    """Sums partial outputs over ranks; the backward gathers the gradient.

    The gradient is gathered in FP8 if `cast` is given.
    """

    @staticmethod
    def forward(
        ctx: Any, partial: torch.Tensor, cast: Cast | None, mesh: DeviceMesh, placement: Placement
    ) -> torch.Tensor:
        """Return the sum, or this rank's part of a sharded one."""
        total = DTensor.from_local(partial.detach(), mesh, [Partial()], run_check=False)
        total = total.redistribute(placements=[placement])
        ctx.cast, ctx.place = cast, ShardPlacement(mesh, placement, total.shape)
        return total.to_local()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the whole gradient."""
        if not ctx.place.placement.is_shard():
            whole = grad
        elif ctx.cast is None:
            whole = ctx.place.distributed(grad.contiguous()).redistribute(placements=[Replicate()]).to_local()
        else:
            whole = gather_codes(grad.contiguous(), ctx.cast, ctx.place)
        return whole, None, None, None
