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
    from matplotlib.figure import Figure

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
    """Return the picture as a PNG."""
    png = io.BytesIO()
    figure_of(report).savefig(png, format="png", dpi=150)
    return png.getvalue()


def figure_of(report: Mapping[str, Any]) -> "Figure":
    """Return, for each section that has runs, their losses, and below them bars of their bytes per step.

    One panel below the other, so that a phone shows them as large as a desktop.
    """
    from matplotlib.figure import Figure

    parts = [part for part in report.values() if isinstance(part, dict) and part.get("runs")]
    figure = Figure(figsize=(4.6, 5.2 * max(len(parts), 1)), layout="constrained")
    grid = figure.subplots(2 * len(parts), 1, squeeze=False, height_ratios=(2, 1) * len(parts))[:, 0]
    for losses, bars, part in zip(grid[::2], grid[1::2], parts, strict=True):
        _draw_losses(losses, part)
        _draw_bars(bars, part)
    return figure


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
    axes.set(xlabel="optimizer step", ylabel="training loss (nats per byte)")
    axes.set_title(part["summary"]["title"], fontsize="medium")
    axes.grid(alpha=0.25)
    axes.legend(frameon=False, fontsize="small")


def _draw_bars(axes: "Axes", part: Mapping[str, Any]) -> None:
    """Draw a section's own "bars" (title, unit, and a height for each run), else the bytes of its runs."""
    runs = part["runs"]
    own = part.get("bars") or {
        "title": "linear weights on the wire",
        "unit": "MB per step and rank",
        "heights": {name: run.get(BYTES, 0) / 1e6 for name, run in runs.items()},
    }
    # lying: names of runs are longer than bars are wide
    bars = axes.barh(list(own["heights"]), list(own["heights"].values()), color=COLOURS[: len(runs)], height=0.6)
    axes.bar_label(bars, fmt="%.2f", padding=2)
    axes.invert_yaxis()
    axes.margins(x=0.15)
    axes.set(xlabel=own["unit"])
    axes.set_title(own["title"], fontsize="medium")
    axes.spines[["top", "right"]].set_visible(False)
