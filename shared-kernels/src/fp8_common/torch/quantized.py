"""`Quantized`: FP8 codes with scales, as casts return and matmuls use."""

from typing import Any, NamedTuple

import torch

from fp8_common.formats import Format
from fp8_common.torch import decoding
from fp8_common.torch.blocks import expand_blocks


class Quantized(NamedTuple):
    """FP8 codes with their scales.

    As an operand of a matmul `a @ b.T`, the layout of FP8 hardware, it is a matrix whose contracted dimension is the
    last. For a stack of matrices, and for rows in groups (`grouped.RowGroups`), codes and scales have additional
    leading dimensions.

    Attributes:
        codes: float8 [rows, contracted], any strides.
        scale_inv: float32 back from FP8: a scalar, [rows, 1], or one per block.
        fmt: Format of the codes.
        block: The block of each scale, where scales do not broadcast.
        transposed: The same matrix with its other dimension contracted, codes [contracted, rows] contiguous, where one
            launch wrote both: its codes are the same for one scale, and made with scales of columns for scales of rows.
        scale: float32 into FP8, of the shape of `scale_inv`, where a cast returned it; else None.
    """

    codes: torch.Tensor
    scale_inv: torch.Tensor
    fmt: Format
    block: tuple[int, int] | None = None
    transposed: "Quantized | None" = None
    scale: Any = None

    def t(self) -> "Quantized":
        """Return the matrix with its other dimension contracted.

        Without `transposed` it is a view: scales must then be a scalar or square blocks' scales.
        """
        if self.transposed is not None:
            return self.transposed
        block = None if self.block is None else (self.block[1], self.block[0])
        scale_inv = transpose(self.scale_inv) if self.scale_inv.ndim >= 2 else self.scale_inv
        return Quantized(transpose(self.codes), scale_inv, self.fmt, block)

    @property
    def expanded_scale_inv(self) -> torch.Tensor:
        """Return float32 scales back that broadcast to the codes.

        Block scales are repeated.
        """
        return self.scale_inv if self.block is None else expand_blocks(self.scale_inv, self.block, self.codes.shape)

    def dequantize(self) -> torch.Tensor:
        """Return the float32 values, codes times scales."""
        return decoding.values(self.codes, self.fmt) * self.expanded_scale_inv


def transpose(x: torch.Tensor) -> torch.Tensor:
    """Return the transposed matrix, or matrices of a stack, as a view."""
    # of a matrix not `mT`, which compilers trace as another operator than `t`, and save other tensors for
    return x.t() if x.ndim == 2 else x.mT
