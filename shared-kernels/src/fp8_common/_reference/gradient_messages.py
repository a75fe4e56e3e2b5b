"""Gradients sent as FP8: rounding, byte layout of messages, summation."""

import dataclasses
from typing import Literal

import numpy as np

from fp8_common._reference.quantize import Quantized, dequantize_blockwise, quantize_blockwise, quantize_stochastic
from fp8_common._reference.rounding import random_bits
from fp8_common.errors import Fp8Error
from fp8_common.formats import Format, get_format
from fp8_common.policy import POWER_OF_2, Record

BLOCK = (1, 128)
"""Elements that share a scale."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class GradientCompression(Record):
    """Configuration of FP8 gradient reduction.

    Each block of 128 consecutive elements shares one power-of-two scale, so the cast to FP8 is the only rounding before
    the sum. With E4M3 and rounding to nearest, an element `x` of a block with the largest magnitude `amax` has an error
    of at most `max(2^-4 |x|, 2^-17 amax)`.

    Attributes:
        format: FP8 format of the codes. "e5m2" covers a wider range within a block, at half the precision.
        rounding: "stochastic" (error with mean zero) or "nearest".
        seed: Seed for stochastic rounding, from 0 to 2^32 - 1. Ranks draw different bits from the same seed.
    """

    format: Literal["e4m3", "e5m2"] = "e4m3"
    rounding: Literal["stochastic", "nearest"] = "stochastic"
    seed: int = 0

    def __post_init__(self) -> None:
        """Validate the fields."""
        self.check_choices()
        if type(self.seed) is not int or not 0 <= self.seed < 2**32:
            raise Fp8Error(f"seed must be an integer from 0 to 2^32 - 1, got {self.seed!r}.")

    @property
    def fp8_format(self) -> Format:
        """`Format` of the codes."""
        return get_format(self.format)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MessageRows:
    """Layout of a message row: codes, scales, and high-precision elements.

    Each section and each row begins at a multiple of 16 bytes. The gaps are filled with zeros.

    Attributes:
        compressed: Number of codes in a row.
        wide_bytes: Number of bytes of high-precision elements in a row.
    """

    compressed: int
    wide_bytes: int

    @property
    def scales(self) -> int:
        """Number of float32 scales, one for each block of codes."""
        return -(-self.compressed // BLOCK[1])

    @property
    def scales_at(self) -> int:
        """Offset of the scales in bytes."""
        return _rounded_up(self.compressed)

    @property
    def wide_at(self) -> int:
        """Offset of the high-precision elements in bytes."""
        return self.scales_at + _rounded_up(4 * self.scales)

    @property
    def nbytes(self) -> int:
        """Length of a row in bytes."""
        return self.wide_at + _rounded_up(self.wide_bytes)

    @property
    def gaps(self) -> tuple[tuple[int, int], ...]:
        """Begin and end of each gap in bytes."""
        ends = (self.compressed, self.scales_at), (self.scales_at + 4 * self.scales, self.wide_at)
        return tuple((a, b) for a, b in (*ends, (self.wide_at + self.wide_bytes, self.nbytes)) if a < b)


def _rounded_up(nbytes: int) -> int:
    return -(-nbytes // 16) * 16


def round_gradients(
    rows: np.ndarray,
    fmt: str | Format,
    *,
    random: tuple[int, int] | None = None,
) -> Quantized[np.ndarray]:
    """Round the gradients that a rank sends.

    Args:
        rows: float16, bfloat16 or float32 [n, m], one row for each rank.
        fmt: FP8 format.
        random: Seed and first counter of the bits for stochastic rounding; None rounds to nearest. Each row begins with
            a new block of 32 counters.

    Returns:
        uint8 codes [n, m], and float32 scales [n, ceil(m / 128)] that are powers of two.
    """
    with np.errstate(all="ignore"):
        values = rows.astype(np.float32)
        codes, scales = quantize_blockwise(values, fmt, BLOCK, POWER_OF_2)
        if random is not None:
            expanded, columns = np.repeat(scales, BLOCK[1], axis=1), values.shape[1]
            bits = random_bits(random[0], expanded.shape, random[1])[:, :columns]
            codes = quantize_stochastic(values, expanded[:, :columns], fmt, bits)
    return Quantized(codes, scales)


def sum_rounded(codes: np.ndarray, scales: np.ndarray, fmt: str | Format, divisor: float = 1.0) -> np.ndarray:
    """Return the float32 sum [m] of received gradients over ranks.

    Ranks are added in order, in float32, and the sum is divided by `divisor`.

    Args:
        codes: uint8 codes [n, m], one row for each rank.
        scales: float32 scales into FP8 [n, ceil(m / 128)].
        fmt: FP8 format.
        divisor: Divisor of the sum.
    """
    parts = dequantize_blockwise(codes, scales, fmt, BLOCK)
    total = parts[0].copy()
    with np.errstate(all="ignore"):
        for part in parts[1:]:
            total += part
        return total / np.float32(divisor)
