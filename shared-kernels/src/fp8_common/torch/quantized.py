"""`Quantized`: FP8 codes with scales, from casts and for matmuls."""

from typing import Any, NamedTuple

import torch

from fp8_common.formats import Format
from fp8_common.torch import decoding
from fp8_common.torch.blocks import expand_blocks


class Quantized(NamedTuple):
    """FP8 codes with their scales.

    As an operand of a matmul `a @ b.T`, the layout of FP8 hardware, it is a matrix whose contracted dimension is the
    last one. For a stack of matrices, and for rows in groups (`grouped.RowGroups`), codes and scales have additional
    leading dimensions.

    Attributes:
        codes: float8 [rows, contracted], any strides.
        scale_inv: Scales back from FP8, float32: a scalar, [rows, 1], or one per block.
        fmt: Format of the codes.
        block: Block size of the scales; None if the scales broadcast to the codes.
        transposed: Operand with the other dimension contracted, whose codes [contracted, rows] are contiguous; None
            unless the cast wrote both layouts. With a tensor scale, or row scales of a weight, the codes are the same;
            otherwise they have separate scales.
        scale: Scales into FP8, float32 of the shape of `scale_inv`; None if the cast did not return them.
    """

    codes: torch.Tensor
    scale_inv: torch.Tensor
    fmt: Format
    block: tuple[int, int] | None = None
    transposed: "Quantized | None" = None
    scale: Any = None

    def t(self) -> "Quantized":
        """Return the operand with the other dimension contracted.

        Without `transposed` it is a view with transposed scales. To contract it, the scales must then be a scalar or
        the scales of square blocks.
        """
        if self.transposed is not None:
            return self.transposed
        block = None if self.block is None else (self.block[1], self.block[0])
        scale_inv = transpose(self.scale_inv) if self.scale_inv.ndim >= 2 else self.scale_inv
        return Quantized(transpose(self.codes), scale_inv, self.fmt, block)

    @property
    def expanded_scale_inv(self) -> torch.Tensor:
        """Scales back from FP8 that broadcast to the codes.

        Block scales are repeated.
        """
        return self.scale_inv if self.block is None else expand_blocks(self.scale_inv, self.block, self.codes.shape)

    def dequantize(self) -> torch.Tensor:
        """Return the float32 values, codes times scales."""
        return decoding.values(self.codes, self.fmt) * self.expanded_scale_inv


def transpose(x: torch.Tensor) -> torch.Tensor:
    """Return a view of the transposed matrix, or stack of matrices."""
    # `t` for a matrix, because compilers trace `mT` as another operator, and save other tensors for it.
    return x.t() if x.ndim == 2 else x.mT
