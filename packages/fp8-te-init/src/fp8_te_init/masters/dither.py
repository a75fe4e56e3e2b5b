"""`dithered`: random values inside the rounding cells of FP8 codes."""

import hashlib
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from fp8_common import Format
from fp8_common.numerics import decode, philox

if TYPE_CHECKING:
    from fp8_te_init.transformer_engine import TeWeight
    from fp8_te_init.weight.state import WeightState


def dithered(weight: "WeightState | TeWeight", *, seed: int, name: str) -> torch.Tensor:
    """Return random float32 values [n, columns] that quantize to the current codes.

    The values are uniform within the rounding cells of the codes. They depend only on seed, name and position in the
    weight, so that they are the same for any number of ranks.

    Args:
        weight: The local rows. TransformerEngine's weights must have one scale.
        seed: Seed of the draw.
        name: Name of the parameter, which selects its random numbers.
    """
    codes = weight.local_codes
    raw, below, above = (torch.from_numpy(table).to(codes.device)[codes.int()] for table in _cells(weight.fmt))
    first = weight.first_row * codes.shape[1]
    share = torch.from_numpy(_uniforms(seed, name, first, first + codes.numel())).view(codes.shape).to(codes.device)
    inverse = weight.expanded_scale_inv()
    spread, middle = (raw + below + (above - below) * share) * inverse, raw * inverse
    # At the end of a cell, rounding may give another code. The code's value itself always stays in the cell.
    return torch.where(weight.quantized(spread) == codes, spread, middle)


def _uniforms(seed: int, name: str, first: int, last: int) -> NDArray[np.float32]:
    """Return uniform numbers in (0, 1] for the elements [first, last)."""
    key = int.from_bytes(hashlib.blake2b(f"{seed}/{name}/dither".encode(), digest_size=8).digest(), "little")
    counter = np.arange(first // 4, -(-last // 4), dtype=np.uint64)  # four numbers per counter
    zeros = np.zeros_like(counter)
    words = np.stack(philox((counter & np.uint64(0xFFFFFFFF), counter >> np.uint64(32), zeros, zeros), key), axis=-1)
    drawn = ((words.astype(np.float64) + 0.5) / 2.0**32).astype(np.float32).reshape(-1)
    return drawn[first % 4 : first % 4 + last - first]


@cache
def _cells(fmt: Format) -> tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.float32]]:
    """Return each code's value and both ends of its rounding cell.

    All are float32 [256], before scaling; the ends are relative to the value.
    """
    values = decode(np.arange(256, dtype=np.uint8), fmt)
    positive = np.unique(values[np.isfinite(values) & (values >= 0)].astype(np.float64))
    half = np.diff(positive) / 2
    below, above = np.zeros(256, np.float32), np.zeros(256, np.float32)
    for code, value in enumerate(values):
        place = int(np.searchsorted(positive, abs(value))) if np.isfinite(value) else len(half)
        if place < len(half):  # the cell of the largest value has no upper end, so that it is not dithered
            inner, outer = half[place - 1] if place else 0.0, half[place]
            below[code], above[code] = (-outer, inner) if np.signbit(value) else (-inner, outer)
    return values.astype(np.float32), below, above
