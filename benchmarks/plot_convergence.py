"""The picture and the table of results/convergence.json: `python -m benchmarks.plot_convergence`.

Curves are means over seeds, smoothed over a twentieth of the run; bands reach from the lowest seed to the highest.
"""

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.convergence_runs import FAMILIES
from benchmarks.marked import between_marks
from demos.common.plot import smooth

HERE = Path(__file__).parent
RESULT = HERE / "results" / "convergence.json"
PICTURE = HERE.parent / "docs" / "assets" / "convergence.png"
PAGE = HERE.parent / "docs" / "numerics" / "convergence.md"
BEGIN, END = "<!-- figures of benchmarks/results/convergence.json -->\n", "\n<!-- end of figures -->"
COLOURS = ("#444444", "#1f6feb", "#d1570c", "#1a7f37", "#8250df", "#c2255c")
Runs = dict[str, dict[str, dict[int, dict[str, Any]]]]


def grouped(result: dict[str, Any]) -> Runs:
    """Return runs by family, way and seed; of each way the seeds that the control of its family has too."""
    found: Runs = {family: {way: {} for way in ways} for family, (_, ways) in FAMILIES.items()}
    for name, run in result["runs"].items():
        family, way, seed = name.split("/")
        found[family][way][int(seed)] = run
    whole = {}
    for family, ways in found.items():
        control = next(iter(ways.values()))
        if all(set(runs) & set(control) for runs in ways.values()):
            whole[family] = {
                way: {seed: runs[seed] for seed in sorted(set(runs) & set(control))} for way, runs in ways.items()
            }
    return whole


def differences(ways: dict[str, dict[int, dict[str, Any]]]) -> dict[str, np.ndarray]:
    """Return, for each way, the relative differences of the held-out loss from the control of the same seed."""
    control = next(iter(ways.values()))
    return {
        way: np.array([run["val_loss"] / control[seed]["val_loss"] - 1 for seed, run in runs.items()])
        for way, runs in ways.items()
    }


def mean_and_error(values: np.ndarray) -> str:
    """Return the mean of relative differences and its standard error, in percent."""
    if len(values) < 2:
        return "-"
    error = values.std(ddof=1) / len(values) ** 0.5
    return f"{100 * values.mean():+.2f} ± {100 * error:.2f} %"


def table(result: dict[str, Any]) -> str:
    """Return the table of the page."""
    lines = [
        "| package | way | seeds | held-out loss | spread of the seeds | from the control: mean, standard error "
        "| per seed |",
        "|---|---|---|---|---|---|---|",
    ]
    for family, ways in grouped(result).items():
        apart = differences(ways)
        for number, (way, runs) in enumerate(ways.items()):
            losses = np.array([run["val_loss"] for run in runs.values()])
            mean = mean_and_error(apart[way]) if number else "the control"
            percent = ", ".join(f"{100 * one:+.2f} %" for one in apart[way]) if number else "-"
            spread = f"{losses.max() - losses.min():.4f}" if len(losses) > 1 else "-"
            lines.append(f"| {family} | {way} | {len(runs)} | {losses.mean():.4f} | {spread} | {mean} | {percent} |")
    return "\n".join(lines)


def sizes(result: dict[str, Any]) -> str:
    """Return what was trained, in words."""
    settings, parameters = result["settings"], defaultdict(set)
    for family, ways in grouped(result).items():
        parameters[family] |= {run["parameters"] for runs in ways.values() for run in runs.values()}
    models = ", ".join(f"{family} {max(counts):,}" for family, counts in parameters.items())
    return (
        f"{settings['steps']} steps of {settings['rows']} x {settings['length']} bytes; width {settings['dim']}, "
        f"{settings['layers']} blocks; parameters: {models}."
    )


def draw_family(axes: Axes, family: str, ways: dict[str, dict[int, dict[str, Any]]]) -> None:
    """Draw how far the training loss of each way is from that of the control."""
    controls = {seed: smooth(run["losses"]) for seed, run in next(iter(ways.values())).items()}
    middle = np.mean(list(controls.values()), axis=0)
    steps = np.arange(1, len(middle) + 1)
    for colour, (way, runs) in zip(COLOURS, ways.items(), strict=False):
        losses = np.array([smooth(run["losses"]) for run in runs.values()])
        shown = losses - (middle if way == next(iter(ways)) else np.array([controls[seed] for seed in runs]))
        axes.fill_between(steps, shown.min(axis=0), shown.max(axis=0), color=colour, alpha=0.15, linewidth=0)
        axes.plot(steps, shown.mean(axis=0), color=colour, linewidth=1.3, label=way)
    axes.set(title=family, xlabel="optimizer step", ylabel="loss minus control (nats per byte)")
    axes.grid(alpha=0.25)
    # below, where no curve is
    axes.legend(frameon=False, fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.17), ncols=2)


def draw_losses(axes: Axes, whole: Runs) -> None:
    """Draw the training loss of every run: at this scale the ways of a package lie over one another."""
    for colour, (family, ways) in zip(COLOURS[1:], whole.items(), strict=False):
        for runs in ways.values():
            for run in runs.values():
                losses = smooth(run["losses"])
                axes.plot(np.arange(1, len(losses) + 1), losses, color=colour, linewidth=0.6, alpha=0.6)
        axes.plot([], [], color=colour, label=f"{family}: {len(ways)} ways")
    axes.set(title="all runs", xlabel="optimizer step", ylabel="training loss (nats per byte)")
    axes.grid(alpha=0.25)
    axes.legend(frameon=False, fontsize=8, loc="upper right")


def figure_of(whole: Runs) -> Figure:
    """Return all panels, one below the other: as wide as a phone can show."""
    figure = Figure(figsize=(4.6, 3.6 * (1 + len(whole))), layout="constrained")
    first, *others = figure.subplots(1 + len(whole), 1, squeeze=False)[:, 0]
    draw_losses(first, whole)
    for axes, (family, ways) in zip(others, whole.items(), strict=True):
        draw_family(axes, family, ways)
    return figure


def main() -> None:
    """Draw the picture and put the figures into the page."""
    result = json.loads(RESULT.read_text())
    figure_of(grouped(result)).savefig(PICTURE, dpi=130)
    PAGE.write_text(between_marks(PAGE.read_text(), BEGIN, END, f"\n{sizes(result)}\n\n{table(result)}\n"))


if __name__ == "__main__":
    main()
