"""Messages of gradients as FP8 codes: rounding and summation.

Each block of 128 elements has a power-of-two scale. `fp8_common._reference.gradient_messages` defines layout and
rounding. On GPUs one kernel packs the codes of a message, and one sums them; elsewhere torch's operations do.
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
"""Elements that stochastic rounding processes at a time, a multiple of a block."""


def pack_gradients(
    values: torch.Tensor, wide: torch.Tensor, fmt: Format, random: tuple[int, int] | None = None
) -> torch.Tensor:
    """Quantize gradients, and pack them into a message.

    The message has one row for each of n ranks.

    Args:
        values: Gradients to quantize, [n, c], any floating-point dtype and strides.
        wide: Gradients to send in high precision, [n, w], any floating-point dtype. They are copied unchanged.
        fmt: FP8 format of the codes.
        random: Seed and first counter of the random bits for stochastic rounding; None rounds to nearest.

    Returns:
        uint8 [n, bytes]: codes, scales and gradients in high precision.
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
    rounded, block_scales = _round(values.float(), fmt, random)
    codes.view(torch.uint8).copy_(rounded.view(torch.uint8))
    scales.copy_(block_scales)
    return message


def sum_gradients(
    message: torch.Tensor, sizes: tuple[int, int], wide_dtype: torch.dtype, fmt: Format, divisor: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum the rows of a message in float32.

    Rows are added from first to last, so that the result depends only on the order of ranks.

    Args:
        message: uint8 [n, bytes], one row of `pack_gradients` from each rank.
        sizes: Numbers (c, w) of quantized gradients and of gradients in high precision.
        wide_dtype: dtype of the gradients in high precision.
        fmt: FP8 format of the codes.
        divisor: Divisor of the sums, for example the number of ranks for an average.

    Returns:
        float32 [c] and [w].
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
    # NumPy draws the bits for any device. They depend only on key and index, so they equal the bits of the kernel.
    (key, offset), columns = random, values.shape[1]
    codes = torch.empty_like(values, dtype=torch_dtype(fmt))
    # In pieces, which stay in the cache of a CPU.
    for row, first in itertools.product(range(len(values)), range(0, columns, PIECE)):
        part = slice(first, min(first + PIECE, columns))
        counter = offset + (row * scales.shape[1] * BLOCK[1] + first) // 4
        bits = torch.from_numpy(random_bits(key, (part.stop - first,), counter)).to(values.device)
        codes[row, part] = quantize_stochastic(values[row, part], expanded[row, part], fmt, bits)
    return codes, scales


def _sum_in_order(parts: torch.Tensor, divisor: float) -> torch.Tensor:
    """Sum float32 [n, m] over n, from first to last, and divide."""
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    # Divide by a tensor: for a Python number, a GPU multiplies by the reciprocal, which rounds twice.
    return total if divisor == 1 or not total.numel() else total.div_(total.new_full((), divisor))


def _rows_of(compressed: int, wide: int, wide_dtype: torch.dtype) -> MessageRows:
    return MessageRows(compressed=compressed, wide_bytes=wide * wide_dtype.itemsize)


def _codes_part(message: torch.Tensor, rows: MessageRows, fmt: Format) -> torch.Tensor:
    return message[:, : rows.compressed].view(torch_dtype(fmt))


def _scale_part(message: torch.Tensor, rows: MessageRows) -> torch.Tensor:
    return message[:, rows.scales_at : rows.scales_at + 4 * rows.scales].view(torch.float32)


def _wide_part(message: torch.Tensor, rows: MessageRows, dtype: torch.dtype) -> torch.Tensor:
    return message[:, rows.wide_at : rows.wide_at + rows.wide_bytes].view(dtype)
