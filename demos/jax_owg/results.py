"""The report's numbers, table and verdict, from the runs' records."""

import math
from collections.abc import Mapping
from typing import Any

from demos.common.report import Summary
from demos.jax_owg.train import Record


def section(records: Mapping[str, Record], options: Any) -> dict[str, Any]:
    """Return the section of the report; losses that are not finite are null, as JSON has no NaN."""
    runs = {
        name: {
            "losses": [finite(value) for value in record.losses],
            "val_loss": finite(record.val_loss),
            "amax_error_vs_reference": finite(record.amax_error),
        }
        for name, record in records.items()
    }
    settings = {name: getattr(options, name) for name in ("steps", "dim", "seed")}
    return {
        "stages": options.stages,
        "microbatches": options.microbatches,
        "runs": runs,
        "amax_error_vs_reference": runs["FP8-MAX"]["amax_error_vs_reference"],
        "settings": settings,
        "bars": {
            "title": "error of the worst amax, first step",
            "unit": "times the true amax",
            "heights": {name: run["amax_error_vs_reference"] or 0.0 for name, run in runs.items()},
        },
    }


def finite(value: float) -> float | None:
    """Return a number, or None where there is none."""
    return value if math.isfinite(value) else None


def held_out(record: Record) -> str:
    """Return the held-out loss as it is printed: a number, or since which step there is none."""
    if math.isfinite(record.val_loss):
        return f"{record.val_loss:.4f}"
    return "no number" if record.lost_at is None else f"no number since step {record.lost_at}"


def distance(loss: float, other: float) -> str:
    """Return by how much a loss differs from another, in percent."""
    return f"{loss / other - 1:+.2%}" if math.isfinite(loss / other) else "no number"


def summarize(records: Mapping[str, Record], options: Any) -> Summary:
    """Return the table and the verdict in words."""
    f32, best, worst = (records[name] for name in ("f32", "FP8-MAX", "FP8-SUM"))
    rows = [
        ["held-out loss (nats per byte)", *map(held_out, records.values())],
        ["largest error of an amax, first step", "", *(f"{records[n].amax_error:.2%}" for n in ("FP8-MAX", "FP8-SUM"))],
    ]
    verdict = [
        f"FP8 with MAX ends {distance(best.val_loss, f32.val_loss)} from float32; the same state added up by autodiff "
        f"ends at {held_out(worst)}.",
        f"{options.stages} stages and {options.microbatches} microbatches: every layer sees "
        f"{options.microbatches} amax per step. MAX is off by {best.amax_error:.2%} from running stage after stage "
        f"at most, SUM by {worst.amax_error:.0%}.",
        "FP8-SUM is there as a warning: it is what a scan does with this state if nobody tells it otherwise.",
    ]
    if worst.lost_at is not None:
        verdict.append(
            f"The scales that FP8-SUM stores are multiplied by {options.microbatches} in every step in which a layer "
            f"sees zeros alone; before step {worst.lost_at} the product of two of them became infinite."
        )
    return Summary(
        title="JAX: a pipelined model in float32 and FP8", columns=["", *records], rows=rows, verdict=verdict
    )
