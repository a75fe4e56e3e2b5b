"""The picture of results/te_init.json: errors of master weights, first changes of codes, memory."""

import json
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

HERE = Path(__file__).parent
RESULT, PICTURE = HERE / "results" / "te_init.json", HERE.parent / "docs" / "assets" / "te-init.png"
COLOURS = {"copy": "#3b6fb6", "dequant": "#d1495b", "dither": "#3a9d6e"}


def draw_errors(axes: Axes, table: dict[str, Any]) -> None:
    """Draw the relative error of masters, sources side by side, a bar for each sigma."""
    names = list(next(iter(table.values())))
    for shift, (sigma, rows) in enumerate(table.items()):
        places = [place + 0.38 * (shift - 0.5) for place in range(len(names))]
        errors = [100 * rows[name]["rel_rmse"] for name in names]
        bars = axes.barh(places, errors, height=0.36, label=f"sigma = {sigma}")
        axes.bar_label(bars, fmt="%.2g %%", padding=2)
    axes.set_yticks(range(len(names)), [name.replace(", ", ",\n").replace(" in ", "\nin ") for name in names])
    axes.set(
        xscale="log",
        xlim=(0.05, 1500),
        ylim=(-0.6, len(names) + 0.1),
        xlabel="relative error of the masters (%)",
        title="What masters lose",
    )
    axes.legend(frameon=False, loc="upper right", ncols=2, fontsize="small")


def draw_flips(axes: Axes, runs: dict[str, Any], seeds: int) -> None:
    """Draw the share of codes that left their first value, at the small learning rate."""
    for source, entry in runs["1e-05"].items():
        shares = [100 * share for share in entry["flipped"]]
        axes.plot(range(1, len(shares) + 1), shares, color=COLOURS[source], label=source)
        for step, key in ((10, "flipped_after_10"), (60, "flipped_after_60")):
            band = entry[key]
            axes.errorbar(
                step, 100 * band["mean"], 100 * band["half_width_95"], color=COLOURS[source], capsize=3, fmt="o"
            )
    title = f"Codes that moved, lr 1e-5, {seeds} seeds"
    axes.set(xlabel="optimizer step", ylabel="share of codes (%)", title=title)
    axes.legend(frameon=False)


def draw_memory(axes: Axes, table: dict[str, Any]) -> None:
    """Draw the memory after initialisation and after release."""
    for shift, (key, label) in enumerate((("peak", "peak"), ("after_init", "built"), ("after_release", "released"))):
        places = [place + 0.27 * (shift - 1) for place in range(len(table))]
        axes.barh(places, [row[key] / 2**20 for row in table.values()], height=0.25, label=label)
    axes.set_yticks(range(len(table)), list(table))
    axes.invert_yaxis()
    axes.set(xlabel="MiB of the process", title="201 million bf16 weights")
    axes.legend(frameon=False)


def figure_of(result: dict[str, Any]) -> Figure:
    """Return the picture of the guide: one panel below the other, as wide as a phone can show."""
    figure = Figure(figsize=(4.6, 11), layout="constrained")
    errors, flips, memory = figure.subplots(3, 1)
    draw_errors(errors, result["master_errors"])
    draw_flips(flips, result["dead_zone"]["runs"], result["dead_zone"]["seeds"])
    draw_memory(memory, result["memory"])
    return figure


def main() -> None:
    """Draw the picture of the guide."""
    figure_of(json.loads(RESULT.read_text())).savefig(PICTURE, dpi=130)
    print(f"Wrote {PICTURE.relative_to(HERE.parent)}.")


if __name__ == "__main__":
    main()
