"""`GradientCompression`: rounding of gradients for the exchange, and their sum."""

import dataclasses
from typing import Literal

import numpy as np

from fp8_common._reference.quantize import Quantized, dequantize_blockwise, quantize_blockwise, quantize_stochastic
from fp8_common._reference.rounding import random_bits
from fp8_common.errors import Fp8Error
from fp8_common.formats import Format, get_format
from fp8_common.policy import POWER_OF_2, Record

BLOCK = (1, 128)
"""The elements with one scale."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class GradientCompression(Record):
    """Settings of compressed gradients.

    Each 128 consecutive elements get one power-of-two scale, so that only the cast to FP8 rounds the sent values. With
    amax the largest magnitude of a block and E4M3, an element x rounded to nearest has an error of at most max(2^-4
    |x|, 2^-17 amax).

    Attributes:
        format: FP8 format of the codes; "e5m2" reaches further down within a block, with half the precision.
        rounding: "stochastic", whose error has mean zero, or "nearest".
        seed: Key of stochastic rounding, 0 to 2^32 - 1; ranks draw different bits from the same seed.
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
        """The format of the codes."""
        return get_format(self.format)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MessageRows:
    """Layout of a message row: codes, scales, and high-precision elements.

    Every section and every row begin at a multiple of 16 bytes; gaps are zero.

    Attributes:
        compressed: Codes of a row.
        wide_bytes: Bytes of the elements in high precision.
    """

    compressed: int
    wide_bytes: int

    @property
    def scales(self) -> int:
        """Number of float32 scales: one for each block of codes."""
        return -(-self.compressed // BLOCK[1])

    @property
    def scales_at(self) -> int:
        """First byte of the scales."""
        return _rounded_up(self.compressed)

    @property
    def wide_at(self) -> int:
        """First byte of the wide elements."""
        return self.scales_at + _rounded_up(4 * self.scales)

    @property
    def nbytes(self) -> int:
        """Length of a row."""
        return self.wide_at + _rounded_up(self.wide_bytes)

    @property
    def gaps(self) -> tuple[tuple[int, int], ...]:
        """First byte and end of each gap between sections."""
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
    """Return codes and scales that a rank sends.

    For `rows` [n, m], one for each rank: codes [n, m] and scales [n, ceil(m / 128)].

    Args:
        rows: float16, bfloat16 or float32.
        fmt: The FP8 format.
        random: Key and offset of the bits of stochastic rounding; each row begins with a new block of counters.
    """
    with np.errstate(all="ignore"):
        values = rows.astype(np.float32)
        codes, scales = quantize_blockwise(values, fmt, BLOCK, POWER_OF_2)
        if random is not None:
            wide, columns = np.repeat(scales, BLOCK[1], axis=1), values.shape[1]
            bits = random_bits(random[0], wide.shape, random[1])[:, :columns]
            codes = quantize_stochastic(values, wide[:, :columns], fmt, bits)
    return Quantized(codes, scales)


def sum_rounded(codes: np.ndarray, scales: np.ndarray, fmt: str | Format, divisor: float = 1.0) -> np.ndarray:
    """Return the float32 sum [m] of codes over ranks.

    Codes are [n, m]; ranks are summed first to last, and the sum is divided by `divisor`.
    """
    parts = dequantize_blockwise(codes, scales, fmt, BLOCK)
    total = parts[0].copy()
    with np.errstate(all="ignore"):
        for part in parts[1:]:
            total += part
        return total / np.float32(divisor)
