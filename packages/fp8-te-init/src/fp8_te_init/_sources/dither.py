"""`dithered`: random values in place of lost ones, spread evenly over what rounds to the same code.

A weight made from codes alone sits in the middle of its rounding cell. Values drawn evenly from the cell have the
distribution of the lost ones, and quantize to the very codes; the single value is not recovered. For random
initialisations whose values are lost, and nothing else: on trained weights it is noise.
"""

import numpy as np
import torch

from fp8_common import Format, decode
from fp8_te_init._sources.base import QuantizedRows
from fp8_te_init._sources.philox import PhiloxSource, Uniform


def dithered(quantized: QuantizedRows, *, seed: int, name: str) -> torch.Tensor:
    """Return float32 values [n, columns] that quantize to the present codes.

    Args:
        quantized: The weight.
        seed: Seed of the model.
        name: Name of the parameter; the values depend on these and on the place, not on the number of ranks.
    """
    codes, fmt = quantized.codes(), quantized.fmt
    below, above = (torch.from_numpy(side).to(codes.device) for side in _cell_sides(fmt))
    share = PhiloxSource(
        Uniform(low=0.0, high=1.0),
        seed=seed,
        # other numbers than those of an initialisation with the same seed and name
        name=f"{name}/dither",
        columns=quantized.full_shape[1:].numel(),
        dtype=torch.float32,
        rows=quantized.rows,
    ).values()
    share = share.view(codes.shape)
    index = codes.int()
    raw = torch.from_numpy(decode(np.arange(256, dtype=np.uint8), fmt)).to(codes.device)[index]
    spread = (raw + below[index] + (above[index] - below[index]) * share.to(codes.device)) * quantized.scale_inv()
    # rounding of the product may leave the cell at its very edge: there the middle is kept
    return torch.where(quantized.quantized(spread) == codes, spread, quantized.values())


def _cell_sides(fmt: Format) -> tuple[np.ndarray, np.ndarray]:
    """Return how far the rounding cell of each of the 256 codes reaches below and above its value, float32.

    Zero has a sign: its cell ends there. The largest value stays: it is the maximum that a current scale was made from,
    and would change that scale, and with it other codes, at the next step. NaN has no cell.
    """
    values = decode(np.arange(256, dtype=np.uint8), fmt).astype(np.float64)
    positive = np.unique(values[np.isfinite(values) & (values >= 0)])
    # The middle between neighbours is where rounding to nearest changes, also between binades of different spacing.
    half = np.diff(positive) / 2
    below, above = np.zeros(256), np.zeros(256)
    for code, value in enumerate(values):
        if not np.isfinite(value):
            continue
        place = int(np.searchsorted(positive, abs(value)))
        # the largest finite value has no neighbour above
        if place == len(half):
            continue
        inner, outer = half[place - 1] if place else 0.0, half[place]
        negative = np.signbit(value)
        below[code], above[code] = (-outer, inner) if negative else (-inner, outer)
    return below.astype(np.float32), above.astype(np.float32)
