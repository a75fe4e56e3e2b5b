"""The FSDP benchmark in one picture of three studies, and as a table for the documents."""

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def summary(result: dict) -> str:
    """Return a Markdown table of the hook and step times, with ratios to ours."""
    hooks, steps = result["hook_seconds_per_weight"], result["step_seconds"]
    lines = ["| | hooks for each weight and step | of ours | step | of ours |", "|---|---|---|---|---|"]
    for name in steps:
        hook = (f"{1e6 * hooks[name]:.0f} µs", f"{hooks[name] / hooks['ours']:.2f}x") if name in hooks else ("-", "-")
        step = (f"{1e3 * steps[name]:.0f} ms", f"{steps[name] / steps['ours']:.2f}x")
        lines.append(f"| {' | '.join((name, *hook, *step))} |")
    lines += ["", "| ranks | implementation | hooks for each weight | a gather of all: collectives | casts | state |"]
    lines.append("|---|---|---|---|---|---|")
    for row in result["worlds"]:
        counts = ", ".join(f"{count} {kind} ({row['bytes'][kind]} bytes)" for kind, count in row["collectives"].items())
        casts = "-" if row["casts"] is None else row["casts"]
        state = f"{row['state_bytes']} bytes" if row["state_bytes"] else "-"
        hook = f"{1e6 * row['hook_seconds_per_weight']:.0f} µs" if row["hook_seconds_per_weight"] else "-"
        lines.append(f"| {row['world']} | {row['implementation']} | {hook} | {counts} | {casts} | {state} |")
    return "\n".join(lines)


def figure_of(result: dict) -> "Figure":
    """Return hook time, step time, and hook time over the number of ranks, one below the other."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.6, 8), layout="constrained")
    hooks, steps, worlds = figure.subplots(3, 1, height_ratios=(1, 1.2, 2))
    for axes, values, factor, label in (
        (hooks, result["hook_seconds_per_weight"], 1e6, "hooks, µs for each weight and step"),
        (steps, result["step_seconds"], 1e3, "step on a CPU, ms; all but bf16 emulated"),
    ):
        axes.barh(list(values), [factor * value for value in values.values()])
        axes.invert_yaxis()
        axes.set_xlabel(label)
    for name in dict.fromkeys(row["implementation"] for row in result["worlds"]):
        rows = [row for row in result["worlds"] if row["implementation"] == name and row["hook_seconds_per_weight"]]
        if rows:
            times = [1e6 * row["hook_seconds_per_weight"] for row in rows]
            worlds.plot([row["world"] for row in rows], times, marker="o", label=name)
    worlds.set(xscale="log", xlabel="ranks, shards of one size", ylabel="hooks, µs for each weight", ylim=(0, None))
    worlds.legend(fontsize="small")
    return figure


def draw(result: dict, path: Path) -> None:
    """Write the picture."""
    import matplotlib

    path.parent.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context({"svg.hashsalt": "fp8"}):
        figure_of(result).savefig(path, metadata={"Date": None})
