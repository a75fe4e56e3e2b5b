"""The table of runs with every wire in FP8 beside bf16, made by `benchmarks.gradient_convergence`, and its verdict."""

from statistics import fmean
from typing import Any

RUNS = {"bf16": "bf16 gathers, float32 gradients", "fp8": "FP8 gathers, FP8 gradients"}
"""What travels in each run, by its name in the result."""


def table(result: dict[str, Any]) -> str:
    """Return the Markdown table: held-out losses of every seed, their mean and how far they lie apart."""
    seeds = len(result["runs"]["bf16"]["held_out"])
    lines = ["| wires | " + " | ".join(f"seed {s}" for s in range(seeds)) + " | mean | apart | received per step |"]
    lines.append("|---|" + "---|" * (seeds + 3))
    for name, words in RUNS.items():
        run = result["runs"][name]
        losses = run["held_out"]
        received = (run["gathered_bytes"] + run["gradient_bytes"]) / 1e6
        cells = [f"{loss:.4f}" for loss in (*losses, fmean(losses), max(losses) - min(losses))]
        lines.append(f"| {words} | {' | '.join(cells)} | {received:.2f} MB |")
    return "\n".join(lines)


def verdict(result: dict[str, Any]) -> str:
    """Return one sentence: whether the means lie closer together than the seeds of bf16 do."""
    bf16, fp8 = (result["runs"][name]["held_out"] for name in RUNS)
    apart, spread = abs(fmean(fp8) - fmean(bf16)), max(bf16) - min(bf16)
    where = "within" if apart <= spread else "beyond"
    return f"The means are {apart:.4f} apart, {where} bf16's own spread of {spread:.4f}."
