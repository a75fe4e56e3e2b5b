"""The bytes in which rows of gradients travel: FP8 codes, their scales, and elements that stay wide.

Row r of the bytes goes to rank r. It holds the codes of the compressed elements, one float32 scale for each of their
blocks, and the wide elements in the dtype of the gradient.
"""

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from fp8_common import POWER_OF_2, GradientCompression
from fp8_common.torch import torch_dtype
from fp8_common.torch.plugin import dispatch
from fp8_torch_fsdp._gradients.random_rounding import RandomBits


@dataclasses.dataclass(frozen=True, slots=True)
class Span:
    """A run of elements of a row, of one parameter or of several that travel alike."""

    length: int
    compressed: bool


def merged(spans: Sequence[Span]) -> tuple[Span, ...]:
    """Return the spans with neighbours that travel alike made one, and without empty ones."""
    result: list[Span] = []
    for span in spans:
        if result and result[-1].compressed == span.compressed:
            result[-1] = Span(result[-1].length + span.length, span.compressed)
        elif span.length:
            result.append(span)
    return tuple(result)


def lengths(spans: Sequence[Span]) -> tuple[int, int]:
    """Return how many elements of a row are compressed and how many stay wide."""
    compressed = sum(span.length for span in spans if span.compressed)
    return compressed, sum(span.length for span in spans) - compressed


def split(rows: Tensor, spans: Sequence[Span]) -> tuple[Tensor, Tensor]:
    """Return the compressed [n, c] and the wide elements [n, w] of `rows` [n, c + w]."""
    parts = rows.split([span.length for span in spans], dim=1)
    return tuple(_joined(rows, spans, parts, compressed) for compressed in (True, False))  # pyrefly: ignore[bad-return]


def _joined(rows: Tensor, spans: Sequence[Span], parts: Sequence[Tensor], compressed: bool) -> Tensor:
    chosen = [part for part, span in zip(parts, spans, strict=True) if span.compressed == compressed]
    return torch.cat(chosen, dim=1) if len(chosen) > 1 else (chosen or [rows[:, :0]])[0]


def join(compressed: Tensor, wide: Tensor, spans: Sequence[Span]) -> Tensor:
    """Undo `split` for rows without their first dimension: [c] and [w] give [c + w]."""
    sources = {True: compressed, False: wide}
    parts, used = [], {True: 0, False: 0}
    for span in spans:
        start = used[span.compressed]
        parts.append(sources[span.compressed][start : start + span.length])
        used[span.compressed] += span.length
    return torch.cat(parts) if len(parts) != 1 else parts[0]


def quantize(values: Tensor, config: GradientCompression, bits: RandomBits | None) -> tuple[Tensor, Tensor]:
    """Return the codes [n, c] of float32 `values` [n, c] and their scales [n, ceil(c / block)]."""
    codes, scales = dispatch.quantize_blockwise(values, config.fp8_format, (1, config.block), POWER_OF_2)
    if bits is not None:
        # products with powers of two are exact, so that these codes are the only rounding as well
        wide = scales.repeat_interleave(config.block, dim=1)[:, : values.shape[1]]
        codes = bits.round(values * wide, config.fp8_format)
    return codes, scales


def dequantize(codes: Tensor, scales: Tensor, config: GradientCompression) -> Tensor:
    """Return the float32 values of codes [n, c] with scales [n, ceil(c / block)]."""
    return dispatch.dequantize(codes, scales, config.fp8_format, torch.float32, block=(1, config.block))


def pack(codes: Tensor, scales: Tensor, wide: Tensor) -> Tensor:
    """Return uint8 rows that hold codes, scales and wide elements one after another."""
    return torch.cat([part.contiguous().view(torch.uint8) for part in (codes, scales, wide) if part.numel()], dim=1)


def unpack(
    rows: Tensor, sizes: tuple[int, int], wide_dtype: torch.dtype, config: GradientCompression
) -> tuple[Tensor, Tensor]:
    """Return the float32 values [n, c] and [n, w] that rows of `pack` hold; `sizes` is (c, w)."""
    compressed, wide = sizes
    scale_bytes = 4 * -(-compressed // config.block)
    parts = rows.split([compressed, scale_bytes, wide * wide_dtype.itemsize], dim=1)
    # contiguous copies: a view as a wider dtype needs rows that begin at its multiples
    codes, scales, rest = (part.contiguous() for part in parts)
    codes = codes.view(torch_dtype(config.fp8_format))
    values = dequantize(codes, scales.view(torch.float32), config) if compressed else codes.float()
    return values, rest.view(wide_dtype).float() if wide else rest.float()
