"""Rows of gradients, cut into elements that travel as FP8 codes and elements that stay wide, and joined again."""

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor


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
