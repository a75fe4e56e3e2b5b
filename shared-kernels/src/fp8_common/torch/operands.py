"""Decides how activations and gradients become FP8 operands of a matrix product.

An operand is a matrix whose contracted dimension is the last: a product is `a @ b.T`, the layout of FP8 hardware.
"""

import dataclasses

import torch

from fp8_common.blocks import Block
from fp8_common.formats import Format
from fp8_common.recipe import CastRecipe
from fp8_common.torch import dispatch
from fp8_common.torch.delayed import DelayedScale

BLOCK_1X128 = (1, 128)


@dataclasses.dataclass(frozen=True, slots=True)
class Operand:
    """One FP8 matrix of a product.

    Attributes:
        codes: float8 [rows, contracted], any strides.
        scale_inv: float32 back from FP8: a scalar, [rows, 1], or one per block.
        fmt: Format of the codes.
        block: The block of each scale, where scales do not broadcast.
    """

    codes: torch.Tensor
    scale_inv: torch.Tensor
    fmt: Format
    block: Block | None = None

    def transposed(self) -> "Operand":
        """Return the matrix with its other dimension contracted; scales must be a scalar or square blocks."""
        block = None if self.block is None else (self.block[1], self.block[0])
        scale_inv = self.scale_inv.t() if self.scale_inv.ndim == 2 else self.scale_inv
        return Operand(self.codes.t(), scale_inv, self.fmt, block)


def cast_operand(
    x: torch.Tensor, cast: CastRecipe, delayed: DelayedScale | None = None, *, record: bool = False
) -> Operand:
    """Cast a matrix whose contracted dimension is the last.

    Args:
        x: [rows, contracted], float32, bfloat16 or float16, any strides.
        cast: Format, scaling, granularity and policy.
        delayed: The state of delayed scaling, where `cast.scaling` is "delayed".
        record: Whether delayed scaling observes `x`.
    """
    fmt = cast.fp8_format
    if cast.granularity == "rowwise":
        codes, scale = dispatch.quantize_rowwise(x, fmt, cast.policy)
        return Operand(codes, dispatch.reciprocal(scale), fmt)
    if cast.granularity == "blockwise_1x128":
        codes, scale = dispatch.quantize_blockwise(x, fmt, BLOCK_1X128, cast.policy)
        return Operand(codes, dispatch.reciprocal(scale), fmt, BLOCK_1X128)
    scale = tensorwise_scale(x, cast, delayed, record=record)
    return Operand(dispatch.quantize(x, scale, fmt), dispatch.reciprocal(scale), fmt)


def tensorwise_scale(x: torch.Tensor, cast: CastRecipe, delayed: DelayedScale | None, *, record: bool) -> torch.Tensor:
    """Return the float32 scalar scale of dynamic, delayed or static tensorwise scaling."""
    if cast.static_scale is not None:
        return torch.full((), cast.static_scale, dtype=torch.float32, device=x.device)
    if delayed is not None:
        return delayed.current(dispatch.amax(x), record)
    return dispatch.scale_from_amax(dispatch.amax(x), cast.fp8_format, cast.policy)
