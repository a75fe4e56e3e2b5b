"""The picture of a report: training loss of every run, and the bytes its weights moved."""

import importlib.util
import io
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from fp8_common import Fp8Error

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = ("#3b6fb6", "#d1495b", "#3a9d6e", "#8c6bb1")
WIDTHS = (4.0, 1.3, 1.3, 1.3)
BYTES = "fp8_weight_bytes_per_step"


def require_matplotlib() -> None:
    """Find out before the training, not after it, that the picture cannot be drawn.

    Raises:
        Fp8Error: matplotlib is not installed.
    """
    if not importlib.util.find_spec("matplotlib"):
        raise Fp8Error("The demo draws its picture with matplotlib: run pip install matplotlib first.")


def draw(report: Mapping[str, Any]) -> bytes:
    """Return a PNG: for each section that has runs, their losses, and bars of their bytes per step."""
    from matplotlib.figure import Figure

    parts = [part for part in report.values() if isinstance(part, dict) and part.get("runs")]
    figure = Figure(figsize=(10, 4.2 * max(len(parts), 1)), layout="constrained")
    grid = figure.subplots(len(parts), 2, squeeze=False, width_ratios=(3, 1))
    for (left, right), part in zip(grid, parts, strict=True):
        _draw_losses(left, part)
        _draw_bars(right, part)
    png = io.BytesIO()
    figure.savefig(png, format="png", dpi=130)
    return png.getvalue()


def smooth(losses: Sequence[float]) -> np.ndarray:
    """Return the mean of each loss and those before it, over a window of a twentieth of the run."""
    window = max(1, len(losses) // 20)
    sums = np.cumsum([0.0, *losses])
    ends = np.arange(1, len(losses) + 1)
    starts = np.maximum(ends - window, 0)
    return (sums[ends] - sums[starts]) / (ends - starts)


def _draw_losses(axes: "Axes", part: Mapping[str, Any]) -> None:
    # Equal curves hide each other: the first is drawn wide, the others thin on top of it.
    for colour, width, (name, run) in zip(COLOURS, WIDTHS, part["runs"].items(), strict=False):
        steps = np.arange(1, len(run["losses"]) + 1)
        # a run that diverged has no number where its loss has none: the line ends there
        losses = [math.nan if loss is None else loss for loss in run["losses"]]
        axes.plot(steps, losses, color=colour, alpha=0.25, linewidth=0.8)
        ending = "none" if run["val_loss"] is None else f"{run['val_loss']:.4f}"
        axes.plot(steps, smooth(losses), color=colour, label=f"{name}: held-out loss {ending}", linewidth=width)
    axes.set(xlabel="optimizer step", ylabel="training loss (nats per byte)", title=part["summary"]["title"])
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)


def _draw_bars(axes: "Axes", part: Mapping[str, Any]) -> None:
    """Draw a section's own "bars" (title, unit, and a height for each run), else the bytes of its runs."""
    runs = part["runs"]
    own = part.get("bars") or {
        "title": "linear weights on the wire",
        "unit": "MB per step and rank",
        "heights": {name: run.get(BYTES, 0) / 1e6 for name, run in runs.items()},
    }
    bars = axes.bar(list(own["heights"]), list(own["heights"].values()), color=COLOURS[: len(runs)], width=0.6)
    axes.bar_label(bars, fmt="%.2f")
    axes.set(ylabel=own["unit"], title=own["title"])
    axes.spines[["top", "right"]].set_visible(False)
