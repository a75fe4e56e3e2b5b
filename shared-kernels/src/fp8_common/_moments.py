"""Optimizer state as E4M3 codes and a power-of-two scale for every 128 elements of a row; the definition.

State of squares (second moments) is stored as its root, which halves the exponents that it needs, and what is not zero
never becomes zero: a step divides by it. Rounding is stochastic, with bits that follow from the number of the step and
from the scaled value itself.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fp8_common._amax import as_float32
from fp8_common._formats import E4M3
from fp8_common._policy import POWER_OF_2
from fp8_common._rounding import decode, encode_stochastic
from fp8_common._scaling import amax_to_scale, reciprocal

MOMENT_BLOCK = 128


class Moments(NamedTuple):
    """State of rows [..., n].

    Attributes:
        codes: uint8 [..., n].
        exponents: uint8 [..., ceil(n / 128)], of the float32 scales into FP8.
    """

    codes: NDArray[np.uint8]
    exponents: NDArray[np.uint8]


def quantize_moments(values: ArrayLike, step: int, *, squares: bool) -> Moments:
    """Return float32 values [..., n] as codes and exponents.

    Args:
        values: Finite; what is not becomes NaN.
        step: The number of the optimizer step.
        squares: Whether the root is to be stored.
    """
    given = as_float32(values)
    blocks = _in_blocks(np.sqrt(given) if squares else given)
    scale = np.asarray(amax_to_scale(np.abs(blocks).max(-1), E4M3, POWER_OF_2))
    with np.errstate(all="ignore"):
        scaled = (blocks * scale[..., None]).astype(np.float32)
    codes = encode_stochastic(scaled, E4M3, moment_bits(scaled, step))
    if squares:
        codes = np.where((codes == 0) & (blocks > 0), np.uint8(1), codes)
    whole = codes.reshape(*given.shape[:-1], -1)[..., : given.shape[-1]]
    return Moments(np.ascontiguousarray(whole), (scale.view(np.uint32) >> 23).astype(np.uint8))


def dequantize_moments(moments: Moments, *, squares: bool) -> NDArray[np.float32]:
    """Return float32 [..., n] of what `quantize_moments` returned."""
    scale_inv = reciprocal((moments.exponents.astype(np.uint32) << 23).view(np.float32))
    blocks = _in_blocks(decode(moments.codes, E4M3)) * scale_inv[..., None]
    values = blocks.reshape(*moments.codes.shape[:-1], -1)[..., : moments.codes.shape[-1]]
    return np.ascontiguousarray(values * values if squares else values)


def moment_bits(values: NDArray[np.float32], step: int) -> NDArray[np.uint32]:
    """Return uint32 bits of the shape of `values` that look random: a hash of the value and of the step."""
    # The finalizer of MurmurHash3.
    bits = values.view(np.uint32) ^ np.uint32(step * 0x9E3779B1 & 0xFFFFFFFF)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        bits = (bits ^ (bits >> np.uint32(shift))) * np.uint32(factor)
    return bits ^ (bits >> np.uint32(16))


def _in_blocks(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return [..., blocks, 128], padded with zeros."""
    padding = [(0, 0)] * (values.ndim - 1) + [(0, -values.shape[-1] % MOMENT_BLOCK)]
    return np.pad(values, padding).reshape(*values.shape[:-1], -1, MOMENT_BLOCK)
