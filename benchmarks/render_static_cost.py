"""The tables of modelled steps in the documents, from static_cost.json and host_time.json in benchmarks/results.

    python -m benchmarks.render_static_cost

Writes docs/guides/torch-fsdp-speed.md (Llama blocks), docs/guides/torch-experts.md (a Qwen3-MoE block) and
docs/numerics/kernels.md (one layer) between their marks.
`python -m benchmarks.static_cost --save` and `python -m benchmarks.host_time --save` make the figures.
"""

import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.marked import between_marks
from benchmarks.modelled.models import CONTENDERS, MODES

ROOT = Path(__file__).parents[1]
RESULT = ROOT / "benchmarks/results/static_cost.json"
BEGIN, END = "<!-- modelled: begin -->", "<!-- modelled: end -->"
HOST = ROOT / "benchmarks/results/host_time.json"
HEAD = ("launches (small)", "host operators", "GB outside of products", "modelled, H100", "x bf16", "x torchao")


def section(result: dict[str, Any], model: str = "block") -> str:
    """Return the tables of a model, one for each width, and what the model of time assumes."""
    steps = [step for step in result["steps"] if step["model"] == model]
    order = {(mode, name): place for place, (mode, name) in enumerate((m, c) for m in MODES for c in CONTENDERS)}
    lines = []
    for width in sorted({step["width"] for step in steps}):
        own = {(step["mode"], step["contender"]): step for step in steps if step["width"] == width}
        lines += [f"| width {width} | {' | '.join(HEAD)} |", "|---" * (len(HEAD) + 1) + "|"]
        lines += [row(own, key) for key in sorted(own, key=lambda key: order[key])]
        lines.append("")
    return "\n".join([*lines, assumed(result)])


def row(steps: dict[tuple[str, str], dict[str, Any]], key: tuple[str, str]) -> str:
    """Return the row of one step; ratios are of modelled times in the same mode, above 1 this one is faster."""
    mode, name = key
    step, time = steps[key], steps[key]["modelled_milliseconds"]["H100"]
    peers = [(mode, "bf16"), (mode, f"torchao-{name.partition('-')[2]}")]
    ratios = [f"{steps[p]['modelled_milliseconds']['H100'] / time:.2f}" if p in steps else "-" for p in peers]
    cells = [
        f"{name.replace('-', ', ')}, {mode}",
        f"{step['launches']} ({step['small_launches']})",
        step["host_operators"],
        f"{step['bytes_outside_products'] / 1e9:.1f}",
        f"{time:.1f} ms",
        *ratios,
    ]
    return f"| {' | '.join(map(str, cells))} |"


def assumed(result: dict[str, Any]) -> str:
    """Return the assumptions in words."""
    percent = {name: f"{100 * share:.0f} %" for name, share in result["assumptions"]["share_of_data_sheet"].items()}
    launch = result["assumptions"]["seconds_per_launch"]
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    return (
        f"Assumed: {percent['bandwidth']} of the data sheet's bandwidth, {percent['bf16']} of its FLOPs in bfloat16 "
        f"and {percent['fp8']} in FP8, whatever the scales, {percent['attention']} for attention, "
        f"{launch['eager'] * 1e6:.0f} µs more for each launch of an eager step. {versions}."
    )


def layers(result: dict[str, Any]) -> str:
    """Return the tables of one linear layer: what it launches and moves, eager and compiled, and the host's time."""
    steps = {(step["contender"], step["mode"]): step for step in result["steps"] if step["model"] == "linear"}
    names = sorted({name for name, _ in steps}, key=lambda name: (name.partition("-")[0] == "ours", name))
    head = " | ".join(f"launches, {mode} | host operators | GB outside of the products" for mode in MODES)
    lines = [f"| layer | {head} |", "|---" * (1 + 3 * len(MODES)) + "|"]
    for name in names:
        found = [steps.get((name, mode)) for mode in MODES]
        counts = [
            f"{step['launches']} | {step['host_operators']} | {step['bytes_outside_products'] / 1e9:.2f}"
            if step
            else "- | - | -"
            for step in found
        ]
        lines.append(f"| {name.replace('-', ', ')} | {' | '.join(counts)} |")
    return "\n".join([*lines, "", *host_times(json.loads(HOST.read_text()))])


def host_times(result: dict[str, Any]) -> list[str]:
    """Return the lines of the table of the host's time for a layer in eager mode."""
    lines = [
        "| layer and step, eager | torch operators that launch | of all kinds | Triton launches | host | x bf16 |",
        "|---" * 6 + "|",
    ]
    for row in result["layers"]:
        counts = [f"{row[name]:.0f}" for name in ("torch_launches", "torch_operators", "triton_launches")]
        cells = [row["contender"].replace("-", ", "), *counts, f"{row['microseconds']:.0f} µs", row["times_bf16"]]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return lines


def mixture(result: dict[str, Any]) -> str:
    """Return the table of a Qwen3-MoE block."""
    return section(result, "moe")


PAGES = {
    ROOT / "docs/guides/torch-fsdp-speed.md": section,
    ROOT / "docs/guides/torch-experts.md": mixture,
    ROOT / "docs/numerics/kernels.md": layers,
}
"""What stands between the marks of each page."""


def rendered(page: str, table: str) -> str:
    """Return the page with its tables brought up to date."""
    return between_marks(page, BEGIN, END, table)


def main() -> int:
    """Write the pages."""
    result = json.loads(RESULT.read_text())
    for path, table in PAGES.items():
        path.write_text(rendered(path.read_text(), table(result)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
