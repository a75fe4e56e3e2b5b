"""`ResidualSource`: bfloat16 values kept beside their FP8 codes with one byte for each, exact to the bit.

The dequantized value, rounded to bfloat16, is near the original. Both are numbered in the order of their values, and
the difference of the numbers fits in a signed byte almost always; the others (escapes) are listed with their place.
"""

import hashlib
from collections.abc import Iterator
from typing import ClassVar

import torch

from fp8_common.torch import torch_dtype
from fp8_common.torch.plugin import dispatch
from fp8_te_init._errors import StaleInitError
from fp8_te_init._host_memory import mapped_copy, mapped_empty
from fp8_te_init._rows import Rows
from fp8_te_init._sources.base import QuantizedRows, Source

WORTH = 0.1
"""Largest share of escapes, 6 bytes each, that is accepted: 1.6 bytes per element in all, where a copy has two."""

PART = 1 << 18
"""Elements that are encoded or decoded at a time."""


class ResidualSource(Source):
    """Differences [n, columns] in int8, escapes, and the digest of the codes that they belong to.

    Args:
        residual: int8 [n, columns].
        escapes: Row-major places [k] in `place_dtype` and their bfloat16 values [k].
        digest: `digest_of` the weight.
        rows: The rows that it holds.
    """

    name: ClassVar[str] = "residual"
    cuts_columns: ClassVar[bool] = False  # digests are those of whole rows

    def __init__(
        self, residual: torch.Tensor, escapes: tuple[torch.Tensor, torch.Tensor], digest: bytes, rows: Rows
    ) -> None:
        self._residual, self._escapes, self._digest, self.rows = residual, escapes, digest, rows

    @classmethod
    def of(cls, values: torch.Tensor, quantized: QuantizedRows) -> "ResidualSource | None":
        """Encode values [n, columns] against the present codes; None if that would not be exact, or not smaller.

        Args:
            values: bfloat16; other dtypes and stacked weights are refused.
            quantized: The weight that was made from them.
        """
        if values.dtype != torch.bfloat16 or values.ndim != 2:
            return None
        rows, columns = values.shape
        residual = mapped_empty(values.shape, torch.int8)
        found = []
        # a few rows at a time: the 32-bit numbers of a whole weight would take four times what is kept
        for part in row_parts(rows, columns):
            difference = ordinal(values[part]) - ordinal(_base(quantized, part))
            fits = (difference >= -128) & (difference <= 127)
            residual[part] = torch.where(fits, difference, 0).to(torch.int8)
            places = (~fits).reshape(-1).nonzero().reshape(-1) + part.start * columns
            found.append(places.to(place_dtype(values.numel())).cpu())
        escaped = torch.cat(found) if found else torch.zeros(0, dtype=torch.int32)
        if escaped.numel() > WORTH * values.numel():
            return None
        exact = values.reshape(-1)[escaped.long().to(values.device)].cpu()
        return cls(residual, (escaped, exact), digest_of(quantized), quantized.rows)

    @property
    def nbytes(self) -> int:
        """Bytes of differences and escapes."""
        return self._residual.nbytes + sum(part.nbytes for part in self._escapes)

    def values(self, quantized: QuantizedRows) -> torch.Tensor:
        """Decode against the present codes.

        Raises:
            StaleInitError: The codes are not those that the differences belong to.
        """
        if digest_of(quantized) != self._digest:
            raise StaleInitError(
                "The FP8 codes or their scales changed after the residual was kept, so it cannot be decoded any more. "
                "Read it before the first optimizer step, or preserve a copy."
            )
        decoded = torch.empty(self._residual.shape, dtype=torch.bfloat16, device=quantized.codes().device)
        for part in row_parts(*self._residual.shape):
            difference = self._residual[part].to(decoded.device).int()
            decoded[part] = from_ordinal(ordinal(_base(quantized, part)) + difference)
        places, exact = (kept.to(decoded.device) for kept in self._escapes)
        decoded.view(-1)[places.long()] = exact
        return decoded

    def narrowed(self, rows: Rows) -> "ResidualSource":
        """Return the source of some rows, with pages of its own."""
        where, columns = rows.inside(self.rows)[0], self._residual.shape[1]
        places, exact = self._escapes
        inside = (places >= where.start * columns) & (places < where.stop * columns)
        own = (places[inside] - where.start * columns).to(place_dtype((where.stop - where.start) * columns))
        escapes = (own, exact[inside])
        digest = slice_digest(self._digest, where)
        return ResidualSource(mapped_copy(self._residual[where]), escapes, digest, rows)


def place_dtype(count: int) -> torch.dtype:
    """Return the smallest dtype of places among `count` elements."""
    return torch.int32 if count <= 1 << 31 else torch.int64


def row_parts(rows: int, columns: int) -> Iterator[slice]:
    """Yield slices that cut a matrix into parts of about `PART` elements."""
    step = max(1, PART // max(1, columns))
    for start in range(0, rows, step):
        yield slice(start, min(rows, start + step))


def _base(quantized: QuantizedRows, part: slice) -> torch.Tensor:
    """Return the dequantized values of some rows in bfloat16."""
    scale_inv = quantized.scale_inv()
    # A scalar serves all rows; two dimensions are scales of rows or blocks, one line for each row.
    scale_inv = scale_inv[part] if scale_inv.ndim == 2 else scale_inv
    codes = quantized.codes()[part].view(torch_dtype(quantized.fmt))
    return (dispatch.values(codes, quantized.fmt) * scale_inv).to(torch.bfloat16)


def ordinal(values: torch.Tensor) -> torch.Tensor:
    """Return int32 numbers of bfloat16 values in the order of the values; -0 is numbered apart from 0."""
    # Bits of positive floats sort like their values; those of negative ones the other way round, hence the sign.
    bits = values.contiguous().view(torch.int16).int()
    return torch.where(bits < 0, -(bits & 0x7FFF) - 1, bits)


def from_ordinal(numbers: torch.Tensor) -> torch.Tensor:
    """Undo `ordinal`."""
    bits = torch.where(numbers < 0, (-numbers - 1) | 0x8000, numbers)
    return torch.where(bits > 0x7FFF, bits - 0x10000, bits).to(torch.int16).view(torch.bfloat16)


def digest_of(quantized: QuantizedRows) -> bytes:
    """Return a digest of the codes and scales of each row, 8 bytes a row."""
    codes = quantized.codes().cpu()
    scales = quantized.scale_inv().cpu()
    # A digest for each row and not for the whole: a shard can then keep those of its rows.
    scales = scales.expand(codes.shape[0], 1 if scales.ndim < 2 else scales.shape[1])
    pairs = zip(codes.contiguous().numpy(), scales.contiguous().numpy(), strict=True)
    return b"".join(hashlib.blake2b(code.tobytes() + scale.tobytes(), digest_size=8).digest() for code, scale in pairs)


def slice_digest(digest: bytes, rows: slice) -> bytes:
    """Return the digest of some rows."""
    return digest[8 * rows.start : 8 * rows.stop]
