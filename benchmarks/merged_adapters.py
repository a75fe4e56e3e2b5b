"""What arrives of an adapter that is merged into the FP8 codes of a published model?

    python -m benchmarks.merged_adapters [--quick]

One random weight with rows of different sizes, quantized as published models are, and a random adapter of rank 16. The
share is the projection of what arrived on the adapter, the error the norm of what differs, by the adapter's norm: not
merging has share 0 and error 1. The last column is what a weight loses, by its norm, where an engine turns its scales
into powers of two and rounds again.
"""

import torch

from benchmarks._common import options, save, table
from fp8_common.formats import FORMATS
from fp8_common.torch import rounding

SIZES, RANK = (1e-3, 3e-3, 1e-2, 3e-2), 16
E4M3 = FORMATS["e4m3"]
SCALES = {
    "128x128, float32": (128, torch.float32),
    "128x128, bfloat16": (128, torch.bfloat16),
    "128x128, E8M0": (128, torch.float8_e8m0fnu),
    "one, float32": (0, torch.float32),
}


def scales_of(w: torch.Tensor, block: int, dtype: torch.dtype) -> torch.Tensor:
    """Return float32 scales back from FP8 for each element: amax / 448, rounded to `dtype`, E8M0 up."""
    block = block or len(w)
    amax = w.view(len(w) // block, block, -1, block).abs().amax((1, 3))
    scale = torch.exp2(torch.ceil(torch.log2(amax / 448))) if dtype == torch.float8_e8m0fnu else (amax / 448).to(dtype)
    return scale.float().repeat_interleave(block, 0).repeat_interleave(block, 1)


def nearest(ready: torch.Tensor) -> torch.Tensor:
    """Return what codes of E4M3 keep."""
    return ready.clamp(-448, 448).to(torch.float8_e4m3fn).float()


def stochastic(ready: torch.Tensor) -> torch.Tensor:
    """Return what stochastically rounded codes of E4M3 keep."""
    bits = torch.randint(0, 2**31, ready.shape) * 2
    return rounding.cast_stochastic(ready.clamp(-448, 448), E4M3, bits.to(torch.uint32)).float()


def arrives(old: torch.Tensor, new: torch.Tensor, delta: torch.Tensor) -> tuple[float, float]:
    """Return share and error."""
    got, norm = (new - old).double(), delta.double().norm()
    return float((got * delta).sum() / norm**2), float((got - delta).norm() / norm)


def main() -> None:
    """Measure and write."""
    chosen, rows = options(__doc__, rounds=1).parse_args(), []
    side = 256 if chosen.quick else 1024
    for name, (block, dtype) in SCALES.items():
        torch.manual_seed(0)
        base = torch.randn(side, side) * 0.03 * torch.exp(0.3 * torch.randn(side, 1))
        direction = torch.randn(side, RANK) @ torch.randn(RANK, side)
        scale = scales_of(base, block, dtype)
        weight = nearest(base / scale) * scale
        power = scales_of(weight, block, torch.float8_e8m0fnu)
        lost = float((nearest(weight / power) * power - weight).norm() / weight.norm())
        for size in SIZES:
            delta = direction * (size * weight.norm() / direction.norm())
            ways = {
                "nearest": arrives(weight, nearest((weight + delta) / scale) * scale, delta),
                "stochastic": arrives(weight, stochastic((weight + delta) / scale) * scale, delta),
                "bfloat16": arrives(weight.bfloat16().float(), (weight + delta).bfloat16().float(), delta),
            }
            rows.append({"scales": name, "size": size, "requantized": lost, **ways})
    ways = ("nearest", "stochastic", "bfloat16")
    lines = [("scales", "adapter / weight", *(f"{way}: share, error" for way in ways), "requantized by an engine")]
    for row in rows:
        arrived = (f"{row[way][0]:.1%}, {row[way][1]:.2f}" for way in ways)
        lost = f"{row['requantized']:.1%}" if row["scales"].startswith("128") else ""
        lines.append((row["scales"], f"{row['size']:g}", *arrived, lost))
    save(chosen.results, "merged_adapters", {"side": side, "rank": RANK, "rows": rows}, table(lines))


if __name__ == "__main__":
    main()
