"""Messages of FP8 rows between ranks, each row with its scale.

A message is uint8 [rows, bytes]. Each row consists of its codes, its float32 scale back from FP8, and padding to a
multiple of 16 bytes, so that every row begins at an aligned address. Received rows are `RowCodes`.
"""

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from fp8_common.formats import FORMATS
from fp8_common.hardware import ALIGNMENT
from fp8_common.recipe import CastRecipe
from fp8_common.torch import decoding
from fp8_common.torch.numerics import torch_dtype
from fp8_common.torch_layers.linear.operand import quantize_operand
from fp8_common.torch_layers.sharding.gathered import GatheredWeight

SCALE_BYTES = 4
"""Bytes of the float32 scale of a row."""


class RowCodes(GatheredWeight):
    """Activation or gradient rows as FP8 codes with row scales.

    FP8 experts multiply the codes of activations directly. Any other operator gets the dequantized values.
    """

    is_weight = False

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, torch.Tensor], context: tuple, outer_size: Any, outer_stride: Any
    ) -> "RowCodes":
        """Rebuild from `__tensor_flatten__`."""
        return RowCodes(inner["codes"], inner["scale_inv"], *context)

    def __coerce_same_metadata_as_tangent__(self, metadata: Any, expected: Any = None) -> torch.Tensor:
        """Dequantize a gradient for a compiled backward, which expects a plain tensor."""
        return self.dequantize()


def row_bytes(columns: int) -> int:
    """Return the number of bytes of a row in a message."""
    return -(-(columns + SCALE_BYTES) // ALIGNMENT) * ALIGNMENT


def pack_rows(x: torch.Tensor, cast: CastRecipe) -> torch.Tensor:
    """Quantize each row, and return the message.

    Args:
        x: float32, bfloat16 or float16 [rows, columns].
        cast: A row-wise cast.

    Returns:
        uint8 [rows, `row_bytes(columns)`].
    """
    operand = quantize_operand(x, cast)
    message = torch.zeros((len(x), row_bytes(x.shape[1])), dtype=torch.uint8, device=x.device)
    message[:, : x.shape[1]] = operand.codes.view(torch.uint8)
    message[:, x.shape[1] : x.shape[1] + SCALE_BYTES] = operand.scale_inv.contiguous().view(torch.uint8)
    return message


def unpack_rows(
    message: torch.Tensor, columns: int, cast: CastRecipe, dtype: torch.dtype, order: torch.Tensor
) -> RowCodes:
    """Select rows of a message, and return them as `RowCodes`.

    Args:
        message: uint8 [rows, `row_bytes(columns)`].
        columns: Number of values in a row.
        cast: The cast that `pack_rows` used.
        dtype: dtype that the result reports and dequantizes to.
        order: int64 [n], the row of the message for each row of the result.

    Returns:
        [n, columns].
    """
    fmt = cast.fp8_format
    codes = message[:, :columns].index_select(0, order).view(torch_dtype(fmt))
    scale_inv = message[:, columns : columns + SCALE_BYTES].index_select(0, order).view(torch.float32)
    return RowCodes(codes, scale_inv, fmt.name, dtype)


def take_rows(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Return the rows `x[index]` of a matrix; `RowCodes` stay codes."""
    return _TakeRows.apply(x, index) if isinstance(x, RowCodes) else x[index]


class _TakeRows(torch.autograd.Function):
    """Selection of rows of `RowCodes`, differentiated like the selection of values."""

    @staticmethod
    def forward(ctx: Any, x: RowCodes, index: torch.Tensor) -> RowCodes:
        ctx.rows = len(x)
        ctx.save_for_backward(index)
        codes = x.codes.view(torch.uint8).index_select(0, index).view(x.codes.dtype)
        return RowCodes(codes, x.scale_inv.index_select(0, index), x.fmt, x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        (index,) = ctx.saved_tensors
        return grad.new_zeros((ctx.rows, *grad.shape[1:])).index_put_((index,), grad, accumulate=True), None


def decoded_rows(x: GatheredWeight) -> torch.Tensor:
    """Decode rows to their exact values.

    The result has no gradient. It is in the dtype of `x`, except that float16 rows are decoded to float32: row scales
    are powers of two, so bfloat16 and float32 hold the values exactly, and float16 has too few exponents.
    """
    dtype = torch.float32 if x.dtype == torch.float16 else x.dtype
    return decoding.dequantize(x.codes, x.scale_inv, FORMATS[x.fmt], dtype)
