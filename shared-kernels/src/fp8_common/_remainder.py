"""A float32 number as its FP8 code and three more bytes; the definition that all frameworks equal.

The three bytes are the lower ones of the float32 number as they are: its mantissa and the last bit of its exponent.
What is missing, the sign and seven bits of the exponent, follows from the code and its scale: among the numbers of the
code's sign with these lower bytes there is one in every two octaves, and the numbers that round to a code lie closer
together. Numbers for which that fails (most of the code 0, what saturates by more than a factor of three) are found by
`not_joined` and have to be kept elsewhere.

So the bytes do not change with the scale, and the code alone does.
"""

from functools import cache

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fp8_common._amax import as_float32
from fp8_common._formats import Format, get_data_format
from fp8_common._rounding import as_codes, decode
from fp8_common._scaling import reciprocal

LOWER_BYTES = 0x00FFFFFF
OCTAVE = 1 << 23
"""Float32 numbers from one power of two to the next."""
SCALE_INV_RANGE = (2.0**-100, 2.0**110)
"""Scales back from FP8 outside of it are taken for its ends: anchors are then neither subnormal nor infinite."""


def lower_bytes(x: ArrayLike) -> NDArray[np.uint8]:
    """Return uint8 [3, ...], the lower three bytes of float32 `x` [...], the least significant first."""
    bits = as_float32(x).view(np.uint32)
    return np.stack([bits, bits >> 8, bits >> 16]).astype(np.uint8)


def join_lower_bytes(
    codes: ArrayLike, scale: ArrayLike, lower: NDArray[np.uint8], fmt: str | Format
) -> NDArray[np.float32]:
    """Return the float32 numbers that have these lower bytes and round to these codes.

    Args:
        codes: uint8, any shape.
        scale: float32 into FP8, broadcastable to `codes`.
        lower: uint8 [3, ...], as `lower_bytes` returns them.
        fmt: The FP8 format.

    Returns:
        float32 of the shape of `codes`; other numbers than were split where `not_joined` says so.
    """
    fmt = get_data_format(fmt)
    code = as_codes(codes, fmt)
    rest = sum(lower[place].astype(np.uint32) << 8 * place for place in range(3))
    # Unsigned integers wrap around; the sign bit of the anchor stays where it is, because no sum reaches it.
    first = (anchors(fmt)[code] * _usable(reciprocal(scale))).view(np.uint32) - np.uint32(OCTAVE)
    bits = first + ((rest - first) & np.uint32(LOWER_BYTES))
    # An exact zero is far below what else rounds to the code 0; its lower bytes stand for nothing else there.
    zero = (code & 0x7F == 0) & (rest == 0)
    return np.where(zero, bits & np.uint32(0x80000000), bits).view(np.float32)


def not_joined(x: ArrayLike, codes: ArrayLike, scale: ArrayLike, fmt: str | Format) -> NDArray[np.bool_]:
    """Return where float32 `x` is not what `join_lower_bytes` makes of its codes and its lower bytes, bit for bit."""
    value = as_float32(x)
    return join_lower_bytes(codes, scale, lower_bytes(value), fmt).view(np.uint32) != value.view(np.uint32)


@cache
def anchors(fmt: Format) -> NDArray[np.float32]:
    """Return float32 [256], for each code a number an octave above the least that is found by it.

    What rounds to a code lies well between half and twice its value, so that the value serves. Of the smallest
    subnormal it is 1/2 to 3/2, of the largest code 15/16 and more, of 0 at most half the smallest subnormal.
    """
    value = decode(np.arange(256, dtype=np.uint8), fmt)
    magnitude, smallest = np.abs(value), fmt.smallest_subnormal
    # 9/32: up to 9/16 of the smallest subnormal, more than half of it however products are rounded.
    magnitude = np.where(magnitude == 0, np.float32(smallest * 9 / 32), magnitude)
    magnitude = np.where(magnitude == smallest, np.float32(smallest * 7 / 8), magnitude)
    magnitude = np.where(magnitude == fmt.max, np.float32(fmt.max * 7 / 4), magnitude)
    # Infinity for codes of NaN: every infinite and NaN float32 lies within the octave above it.
    magnitude = np.where(np.isfinite(value), magnitude, np.float32(np.inf))
    table = np.where(np.arange(256) >= 0x80, -magnitude, magnitude).astype(np.float32)
    table.setflags(write=False)  # it is cached
    return table


def _usable(scale_inv: NDArray[np.float32]) -> NDArray[np.float32]:
    # fmin and fmax give a number for NaN.
    lowest, highest = (np.float32(end) for end in SCALE_INV_RANGE)
    return np.fmin(np.fmax(scale_inv, lowest), highest)
