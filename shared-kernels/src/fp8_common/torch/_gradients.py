"""Gradients that travel as codes, on tensors: rounding into the rows of a message, and the sum of what arrives.

The definition is `fp8_common._gradient_compression`. On GPUs each direction is one kernel; elsewhere, and for blocks of
another length than 128, it is made of the references.
"""

import torch

from fp8_common._formats import Format, get_data_format
from fp8_common._gradient_compression import MessageRows
from fp8_common._philox import random_bits
from fp8_common._policy import POWER_OF_2
from fp8_common.torch import _triton_backend as triton_backend
from fp8_common.torch._ops import NAMESPACE
from fp8_common.torch._quantize import (
    block_amax,
    dequantize_blockwise,
    expand_blocks,
    quantize,
    quantize_stochastic,
)
from fp8_common.torch._rounding import torch_dtype
from fp8_common.torch._scaling import scale_from_amax

Random = tuple[int, int] | None
"""Key and offset of the bits of stochastic rounding; None rounds to nearest."""


def message_rows(compressed: int, wide: int, dtype: torch.dtype, block: int) -> MessageRows:
    """Return where `compressed` codes and `wide` elements of `dtype` lie in a row."""
    return MessageRows(compressed=compressed, wide_bytes=wide * dtype.itemsize, block=block)


def pack_gradients(
    values: torch.Tensor,
    wide: torch.Tensor,
    fmt: Format,
    block: int,
    residual: torch.Tensor | None = None,
    random: Random = None,
) -> torch.Tensor:
    """Return the message uint8 [n, bytes]: codes and scales of `values` [n, c], and `wide` [n, w] as it is.

    Args:
        values: float16, bfloat16 or float32; its rows may lie apart.
        wide: Any dtype of floating point.
        fmt: The FP8 format.
        block: Elements with one scale.
        residual: bfloat16 [n, c], contiguous: it is added, and overwritten with what rounding takes.
        random: Where random bits come from.
    """
    values = values.float() if values.dtype == torch.float64 else values
    rows = message_rows(values.shape[1], wide.shape[1], wide.dtype, block)
    message = torch.empty((values.shape[0], rows.nbytes), dtype=torch.uint8, device=values.device)
    for start, end in rows.gaps:
        message[:, start:end].zero_()
    if wide.shape[1]:
        _wide_part(message, rows, wide.dtype).copy_(wide)
    if rows.compressed == 0:
        return message
    codes = message[:, : rows.compressed].view(torch_dtype(fmt))
    if block == 128 and values.stride(1) == 1 and triton_backend.applies(values, fmt):
        triton_backend.pack_gradients(values, residual, fmt, random, codes, _scale_part(message, rows))
        return message
    rounded, scales = _round(values, residual, fmt, block, random)
    codes.view(torch.uint8).copy_(rounded.view(torch.uint8))
    _scale_part(message, rows).copy_(scales)
    return message


def pack_next_gradients(
    values: torch.Tensor,
    wide: torch.Tensor,
    fmt: Format,
    block: int,
    residual: torch.Tensor | None,
    counter: torch.Tensor | None,
) -> torch.Tensor:
    """Return the message of `pack_gradients` and move the counter on.

    Args:
        values: As there.
        wide: As there.
        fmt: As there.
        block: As there.
        residual: As there.
        counter: int64 [3] on the CPU: key and offset of the random bits, and what is added to the offset for the next
            message; None rounds to nearest.
    """
    if counter is None:
        return pack_gradients(values, wide, fmt, block, residual)
    # on the CPU, where a kernel's arguments come from: reading it waits for no device
    key, offset, step = counter.tolist()
    counter[1] += step
    return pack_gradients(values, wide, fmt, block, residual, (key, offset))


def sum_gradients(
    message: torch.Tensor,
    compressed: int,
    wide: int,
    wide_dtype: torch.dtype,
    fmt: Format,
    block: int,
    divisor: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return float32 [c] and [w]: sums over the rows of a message, first to last, divided by `divisor`."""
    rows = message_rows(compressed, wide, wide_dtype, block)
    rest = _in_order(_wide_part(message, rows, wide_dtype).float(), divisor)
    if compressed == 0:
        return message.new_empty(0, dtype=torch.float32), rest
    codes, scales = message[:, :compressed].view(torch_dtype(fmt)), _scale_part(message, rows)
    if block == 128 and triton_backend.applies(message, fmt):
        return triton_backend.sum_gradients(codes, scales, fmt, divisor), rest
    parts = dequantize_blockwise(codes.contiguous(), scales.contiguous(), fmt, (1, block), torch.float32)
    return _in_order(parts, divisor), rest


def unpack_gradients(
    message: torch.Tensor, compressed: int, wide: int, wide_dtype: torch.dtype, fmt: Format, block: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return float32 [n * c] and [n * w]: the rows of a message one after another."""
    rows = message_rows(compressed, wide, wide_dtype, block)
    rest = _wide_part(message, rows, wide_dtype).float().reshape(-1)
    codes, scales = message[:, :compressed].view(torch_dtype(fmt)).contiguous(), _scale_part(message, rows)
    module = triton_backend.module_for(message, fmt)
    values = module.dequantize_blockwise(codes, scales.contiguous(), fmt, (1, block), torch.float32)
    return values.reshape(-1), rest


def _round(
    values: torch.Tensor, residual: torch.Tensor | None, fmt: Format, block: int, random: Random
) -> tuple[torch.Tensor, torch.Tensor]:
    values = values.float() if residual is None else values + residual.float()
    amax = block_amax(values, (1, block))
    scales = scale_from_amax(amax, fmt, POWER_OF_2)
    wide = expand_blocks(scales, (1, block), values.shape)
    if random is None:
        codes = quantize(values, wide, fmt, amax)
    else:
        shape = (values.shape[0], scales.shape[1] * block)
        # Drawn by NumPy whatever the device: any element's bits follow from its place alone, so all agree.
        bits = torch.from_numpy(random_bits(random[0], shape, random[1]))[:, : values.shape[1]].contiguous()
        codes = quantize_stochastic(values, wide, fmt, bits.to(values.device))
    if residual is not None:
        lost = values - dequantize_blockwise(codes, scales, fmt, (1, block), torch.float32)
        # a step with infinity or NaN is skipped or ends the run; what it lost must not reach the next one
        residual.copy_(torch.where(lost.isfinite(), lost, 0.0))
    return codes, scales


def _in_order(parts: torch.Tensor, divisor: float) -> torch.Tensor:
    """Return the sum of float32 [n, m] over its first dimension, first to last, divided."""
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total if divisor == 1 else total.div_(divisor)


def _scale_part(message: torch.Tensor, rows: MessageRows) -> torch.Tensor:
    return message[:, rows.scales_at : rows.scales_at + 4 * rows.scales].view(torch.float32)


def _wide_part(message: torch.Tensor, rows: MessageRows, dtype: torch.dtype) -> torch.Tensor:
    return message[:, rows.wide_at : rows.wide_at + rows.wide_bytes].view(dtype)


def _empty_message(values: torch.Tensor, wide: torch.Tensor, block: int) -> torch.Tensor:
    rows = message_rows(values.shape[1], wide.shape[1], wide.dtype, block)
    return values.new_empty((values.shape[0], rows.nbytes), dtype=torch.uint8)


@torch.library.custom_op(f"{NAMESPACE}::pack_gradients", mutates_args=())
def pack_gradients_op(values: torch.Tensor, wide: torch.Tensor, fmt: str, block: int) -> torch.Tensor:
    """The message uint8 [n, bytes] of `pack_gradients`, rounded to nearest without a residual."""
    return pack_gradients(values, wide, get_data_format(fmt), block)


@pack_gradients_op.register_fake
def _(values: torch.Tensor, wide: torch.Tensor, fmt: str, block: int) -> torch.Tensor:
    return _empty_message(values, wide, block)


@torch.library.custom_op(f"{NAMESPACE}::pack_next_gradients", mutates_args=("residual", "counter"))
def pack_next_gradients_op(
    values: torch.Tensor,
    wide: torch.Tensor,
    residual: torch.Tensor | None,
    counter: torch.Tensor | None,
    fmt: str,
    block: int,
) -> torch.Tensor:
    """The message uint8 [n, bytes] of `pack_next_gradients`, which changes `residual` and `counter`."""
    return pack_next_gradients(values, wide, get_data_format(fmt), block, residual, counter)


@pack_next_gradients_op.register_fake
def _(
    values: torch.Tensor,
    wide: torch.Tensor,
    residual: torch.Tensor | None,
    counter: torch.Tensor | None,
    fmt: str,
    block: int,
) -> torch.Tensor:
    return _empty_message(values, wide, block)


@torch.library.custom_op(f"{NAMESPACE}::unpack_gradients", mutates_args=())
def unpack_gradients_op(
    message: torch.Tensor, compressed: int, wide: int, wide_dtype: torch.dtype, fmt: str, block: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The float32 values [n * c] and [n * w] of `unpack_gradients`."""
    return unpack_gradients(message, compressed, wide, wide_dtype, get_data_format(fmt), block)


@unpack_gradients_op.register_fake
def _(
    message: torch.Tensor, compressed: int, wide: int, wide_dtype: torch.dtype, fmt: str, block: int
) -> tuple[torch.Tensor, torch.Tensor]:
    sizes = (message.shape[0] * compressed, message.shape[0] * wide)
    return tuple(message.new_empty(size, dtype=torch.float32) for size in sizes)  # pyrefly: ignore[bad-return]


@torch.library.custom_op(f"{NAMESPACE}::sum_gradients", mutates_args=())
def sum_gradients_op(
    message: torch.Tensor,
    compressed: int,
    wide: int,
    wide_dtype: torch.dtype,
    fmt: str,
    block: int,
    divisor: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The float32 sums [c] and [w] of `sum_gradients`."""
    return sum_gradients(message, compressed, wide, wide_dtype, get_data_format(fmt), block, divisor)


@sum_gradients_op.register_fake
def _(
    message: torch.Tensor,
    compressed: int,
    wide: int,
    wide_dtype: torch.dtype,
    fmt: str,
    block: int,
    divisor: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    return message.new_empty(compressed, dtype=torch.float32), message.new_empty(wide, dtype=torch.float32)
