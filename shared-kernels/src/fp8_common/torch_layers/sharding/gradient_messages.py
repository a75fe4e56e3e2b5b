"""Messages of gradients as FP8 codes: rounding and summation.

Each block of 128 elements has a power-of-two scale. Defined in `fp8_common._reference.gradient_messages`. On GPUs each
direction is one kernel; elsewhere it uses the references.
"""

import itertools

import torch

from fp8_common._reference.gradient_messages import BLOCK, MessageRows
from fp8_common._reference.rounding import random_bits
from fp8_common.formats import Format
from fp8_common.policy import POWER_OF_2
from fp8_common.torch._triton import launch, name_of, plans, takes
from fp8_common.torch.blocks import block_amax, expand_blocks
from fp8_common.torch.decoding import dequantize
from fp8_common.torch.numerics import divide, scale_from_amax, torch_dtype
from fp8_common.torch.rounding import quantize, quantize_stochastic

PIECE = 2**15
"""Elements that are rounded at random at a time, a multiple of a block."""


def pack_gradients(
    values: torch.Tensor, wide: torch.Tensor, fmt: Format, random: tuple[int, int] | None = None
) -> torch.Tensor:
    """Return a message with codes, scales and unchanged elements.

    A row for each of n ranks.

    Args:
        values: [n, c], a floating-point dtype; its rows may be strided.
        wide: [n, w], a floating-point dtype.
        fmt: The FP8 format.
        random: Key and offset of the bits of stochastic rounding; None rounds to nearest.

    Returns:
        uint8 [n, bytes].
    """
    values = values.float() if values.dtype == torch.float64 else values
    rows = _rows_of(values.shape[1], wide.shape[1], wide.dtype)
    message = torch.empty((values.shape[0], rows.nbytes), dtype=torch.uint8, device=values.device)
    for start, end in rows.gaps:
        message[:, start:end].zero_()
    if wide.shape[1]:
        _wide_part(message, rows, wide.dtype).copy_(wide)
    if rows.compressed == 0:
        return message
    codes, scales = _codes_part(message, rows, fmt), _scale_part(message, rows)
    if values.stride(1) == 1 and takes(values, fmt):
        strides = values.stride(0), codes.stride(0)
        plan = plans().pack_gradients(*values.shape, strides, name_of(values.dtype), fmt, random=random)
        launch(plan, values.device, x_ptr=values, y_ptr=codes, scale_ptr=scales)
        return message
    rounded, own_scales = _round(values.float(), fmt, random)
    codes.view(torch.uint8).copy_(rounded.view(torch.uint8))
    scales.copy_(own_scales)
    return message


def sum_gradients(
    message: torch.Tensor, sizes: tuple[int, int], wide_dtype: torch.dtype, fmt: Format, divisor: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return float32 [c] and [w]: sums over a message's rows.

    First to last, divided by `divisor`.

    Args:
        message: uint8 [n, bytes], one row from each rank, made by `pack_gradients`.
        sizes: (c, w).
        wide_dtype: The dtype of the wide elements.
        fmt: The format of the codes.
        divisor: The number of ranks for an average.
    """
    rows = _rows_of(*sizes, wide_dtype)
    wide = _sum_in_order(_wide_part(message, rows, wide_dtype).float(), divisor)
    if rows.compressed == 0:
        return message.new_empty(0, dtype=torch.float32), wide
    codes, scales = _codes_part(message, rows, fmt), _scale_part(message, rows)
    if takes(message, fmt):
        plan = plans().sum_gradients(*codes.shape, codes.stride(0), fmt, "float32", divisor)
        return launch(plan, codes.device, q_ptr=codes, scale_ptr=scales)[0], wide
    parts = dequantize(codes.contiguous(), divide(1.0, scales.contiguous()), fmt, torch.float32, BLOCK)
    return _sum_in_order(parts, divisor), wide


def _round(values: torch.Tensor, fmt: Format, random: tuple[int, int] | None) -> tuple[torch.Tensor, torch.Tensor]:
    amax = block_amax(values, BLOCK)
    scales = scale_from_amax(amax, fmt, POWER_OF_2)
    expanded = expand_blocks(scales, BLOCK, values.shape)
    if random is None:
        return quantize(values, expanded, fmt, amax), scales
    # Drawn by NumPy on any device: any element's bits follow only from its index, so all agree.
    (key, offset), columns = random, values.shape[1]
    codes = torch.empty_like(values, dtype=torch_dtype(fmt))
    # in pieces, which stay in the cache of a CPU
    for row, first in itertools.product(range(len(values)), range(0, columns, PIECE)):
        part = slice(first, min(first + PIECE, columns))
        counter = offset + (row * scales.shape[1] * BLOCK[1] + first) // 4
        bits = torch.from_numpy(random_bits(key, (part.stop - first,), counter)).to(values.device)
        codes[row, part] = quantize_stochastic(values[row, part], expanded[row, part], fmt, bits)
    return codes, scales


def _sum_in_order(parts: torch.Tensor, divisor: float) -> torch.Tensor:
    """Return the sum of float32 [n, m] over n, divided.

    First to last.
    """
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    # The divisor is a tensor of the same device: a GPU multiplies by the reciprocal of a number, which rounds twice.
    return total if divisor == 1 or not total.numel() else total.div_(total.new_full((), divisor))


def _rows_of(compressed: int, wide: int, wide_dtype: torch.dtype) -> MessageRows:
    return MessageRows(compressed=compressed, wide_bytes=wide * wide_dtype.itemsize)


def _codes_part(message: torch.Tensor, rows: MessageRows, fmt: Format) -> torch.Tensor:
    return message[:, : rows.compressed].view(torch_dtype(fmt))


def _scale_part(message: torch.Tensor, rows: MessageRows) -> torch.Tensor:
    return message[:, rows.scales_at : rows.scales_at + 4 * rows.scales].view(torch.float32)


def _wide_part(message: torch.Tensor, rows: MessageRows, dtype: torch.dtype) -> torch.Tensor:
    return message[:, rows.wide_at : rows.wide_at + rows.wide_bytes].view(dtype)
