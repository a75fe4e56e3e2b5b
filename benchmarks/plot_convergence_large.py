"""Pictures and tables of results/convergence-large.json and -small.json: `python -m benchmarks.plot_convergence_large`.

Curves are smoothed differences of the training loss from bf16; bands reach from the lowest seed to the highest. A run
that diverged has no curve; the table says where.
"""

import json
from collections import defaultdict
from typing import Any

from matplotlib.figure import Figure

from benchmarks.convergence_large import RESULT, SMALL_RESULT, WAYS, table
from benchmarks.marked import between_marks
from benchmarks.plot_convergence import PAGE, draw_family
from demos.torch_fsdp.train import LENGTH

ASSETS = PAGE.parents[1] / "assets"
MARKS = {RESULT: "larger", SMALL_RESULT: "smaller"}
"""What the marks around the figures of a file call them."""
Ways = dict[str, dict[int, dict[str, Any]]]


def curves(result: dict[str, Any]) -> dict[str, Ways]:
    """Return the runs that ended, by "corpus, regime", way and seed; seeds whose bf16 ended too, bf16 first."""
    runs: dict[str, Ways] = defaultdict(lambda: {way: {} for way in WAYS})
    for name, run in result["runs"].items():
        corpus, regime, way, seed = name.split("/")
        if not run["diverged_at"]:
            runs[f"{corpus}, {regime}"][way][int(seed)] = run
    found = {}
    for title, ways in runs.items():
        control = ways[WAYS[0]]
        kept = {way: {s: ways[way][s] for s in sorted(set(ways[way]) & set(control))} for way in WAYS}
        if control:
            found[title] = {way: seeds for way, seeds in kept.items() if seeds}
    return found


def figure_of(panels: dict[str, Ways]) -> Figure:
    """Return one panel for each corpus and regime, one below the other: as wide as a phone can show."""
    figure = Figure(figsize=(4.6, 3.6 * len(panels)), layout="constrained")
    for axes, (title, ways) in zip(figure.subplots(len(panels), 1, squeeze=False)[:, 0], panels.items(), strict=True):
        draw_family(axes, title, ways)
    return figure


def text(result: dict[str, Any]) -> str:
    """Return what the page says: sizes, and which recipe survives what."""
    settings, runs = result["settings"], result["runs"]
    parameters = max(run["parameters"] for run in runs.values())
    seeds = len({name.rpartition("/")[2] for name in runs})
    sizes = (
        f"{settings['steps']:,} steps of {settings['rows']} x {LENGTH} bytes on each of {settings['ranks']} ranks; "
        f"{parameters:,} parameters; {len(runs)} runs of {seeds} {'seed' if seeds == 1 else 'seeds'}."
    )
    return f"{sizes}\n\n{table(result)}"


def main() -> None:
    """Draw the pictures and put the tables into the page."""
    for path, mark in MARKS.items():
        result = json.loads(path.read_text())
        figure_of(curves(result)).savefig(ASSETS / f"{path.stem}.png", dpi=130)
        begin, end = f"<!-- figures of benchmarks/results/{path.name} -->\n", f"\n<!-- end of {mark} figures -->"
        PAGE.write_text(between_marks(PAGE.read_text(), begin, end, f"\n{text(result)}\n"))


if __name__ == "__main__":
    main()
