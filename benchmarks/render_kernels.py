"""Measured GPU figures for the documents: cells of text, a table of other libraries and a picture.

    python -m benchmarks.render_kernels [benchmarks/results/gpu-NAME.json]

Writes benchmarks/results/kernels.md, which docs/numerics/kernels.md includes, and docs/assets/numerics/bandwidth.svg.
Without a result there is nothing to write, and the table says "not measured".
"""

import json
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = Path("benchmarks/results/kernels.md")
PICTURE = Path("docs/assets/numerics/bandwidth.svg")
BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"
STATIC_NAMES = {
    "amax": ("amax",),
    "cast": ("cast",),
    "tensorwise": ("cast, dynamic scale",),
    "cast + transpose": ("cast + transpose",),
    "row-wise": ("row-wise",),
    "1x128": ("1x128",),
    "128x128": ("128x128",),
    "mx": ("MX rceil",),
    "pack gradients": ("pack gradients",),
    "sum gradients": ("sum gradients",),
    "foreach amax, 200 shards": ("foreach amax",),
}
"""Which rows of the static table a measured task fills."""


def render(result_path: Path, root: Path = ROOT) -> None:
    """Write the figures of one result into the page and draw the picture.

    Args:
        result_path: What `benchmarks.kernels` wrote.
        root: The repository, or a copy of the page in a folder.
    """
    result = json.loads(result_path.read_text())
    page = root / PAGE
    text = with_cells(page.read_text(), cells(result))
    page.write_text(between_marks(text, BEGIN, END, section(result, result_path.name)))
    draw(result, root / PICTURE)


def between_marks(page: str, begin: str, end: str, text: str) -> str:
    """Return a page with other text between two marks, each of which stands on a line of its own.

    Raises:
        ValueError: A mark is missing.
    """
    before, found, rest = page.partition(f"{begin}\n")
    _, closed, after = rest.partition(end)
    if not (found and closed):
        raise ValueError(f"The page lacks {end if found else begin!r}; put text between both marks by hand once.")
    return f"{before}{begin}\n{text}\n{end}{after}"


def ours(result: dict) -> list[dict]:
    """Return our rows on bfloat16 (the shards are float32), the largest input of each task."""
    rows = [r for r in result["rows"] if r["implementation"] == "ours"]
    rows = [r for r in rows if r["dtype"] == "bfloat16" or r["kernel"].startswith("foreach")]
    largest = {r["kernel"]: r for r in sorted(rows, key=lambda r: r["bytes"])}
    return [largest[kernel] for kernel in dict.fromkeys(r["kernel"] for r in rows)]


def cells(result: dict) -> dict[str, str]:
    """Return the cell of the static table's last column by kernel."""
    return {
        name: f"{row['gigabytes_per_second']:.0f} GB/s, {row['of_ceiling']:.0%}"
        for row in ours(result)
        for name in STATIC_NAMES.get(row["kernel"], ())
    }


def with_cells(text: str, found: dict[str, str]) -> str:
    """Return the page with the last cell of every row of the static table brought up to date."""
    lines = text.splitlines()
    for i, line in enumerate(lines):
        parts = line.split("|")
        if len(parts) == COLUMNS and parts[1].strip() not in ("kernel", "---"):
            lines[i] = "|".join([*parts[:-2], f" {found.get(parts[1].strip(), 'not measured')} ", ""])
    return "\n".join(lines) + "\n"


COLUMNS = 12
"""Parts that the bars of a row of the static table make."""


def section(result: dict, name: str) -> str:
    """Return what the page says about a result: where it was measured, and our ratio to each peer."""
    versions = ", ".join(f"{package} {version}" for package, version in result["versions"].items())
    head = (
        f"{result['device']}, {versions}. A copy of 512 MiB reaches {result['copy_gigabytes_per_second']:.0f} GB/s; "
        f"shares are of a copy of as many bytes in the same rounds. Medians; `benchmarks/results/{name}`."
    )
    peers = dict.fromkeys(r["implementation"] for r in result["rows"] if r["implementation"] not in ("ours", "copy"))
    lines = [head, "", f"| kernel | input | GB/s | of copy | {' | '.join(f'{p} / ours' for p in peers)} |"]
    lines.append("|---" * (4 + len(peers)) + "|")
    for row in ours(result):
        others = {r["implementation"]: r for r in result["rows"] if task(r) == task(row)}
        ratios = (f"{others[p]['seconds'] / row['seconds']:.2f}" if p in others else "-" for p in peers)
        shape = " x ".join(map(str, row["shape"]))
        bandwidth = f"{row['gigabytes_per_second']:.0f} | {row['of_ceiling']:.0%}"
        lines.append(f"| {row['kernel']} | {row['dtype']} {shape} | {bandwidth} | {' | '.join(ratios)} |")
    lines += ["", "Ratios of times: above 1 ours is faster.", *models(result)]
    picture = f"![Bandwidth of every kernel and its peers](../assets/numerics/{PICTURE.name})"
    return "\n".join([*lines, "", picture])


def models(result: dict) -> list[str]:
    """Return the lines of a table of training steps, as multiples of bfloat16's time; none if none were measured."""
    found = result.get("models", {})
    if not found:
        return []
    times = {name: {step["implementation"]: step for step in one["steps"]} for name, one in found.items()}
    titles = {name: f"{name}, {'compiled' if one['steps'][0]['compiled'] else 'eager'}" for name, one in found.items()}
    lines = ["", f"| training step | {' | '.join(titles.values())} |", "|---" * (1 + len(found)) + "|"]
    for implementation in dict.fromkeys(name for steps in times.values() for name in steps):
        steps = (steps.get(implementation) for steps in times.values())
        cells = (f"{s['milliseconds']:.2f} ms, {s['times_bf16']:.2f}x" if s else "not measured" for s in steps)
        lines.append(f"| {implementation} | {' | '.join(cells)} |")
    widths = "Widths are those of Llama 3.1 8B; experts are those of Qwen3-30B-A3B."
    return [*lines, "", f"Multiples are of the time of bfloat16: below 1 is faster. {widths}"]


def task(row: dict) -> tuple:
    """Return what makes two rows comparable."""
    return row["kernel"], row["dtype"], tuple(row["shape"])


def draw(result: dict, path: Path) -> None:
    """Draw the bandwidth of every implementation of every task, and the copies."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = ours(result)
    names = list(dict.fromkeys(r["implementation"] for r in result["rows"] if task(r) in map(task, rows)))
    figure, axes = pyplot.subplots(figsize=(9, 4.5), layout="constrained")
    width = 0.8 / max(1, len(names))
    for i, name in enumerate(names):
        found = {task(r): r["gigabytes_per_second"] for r in result["rows"] if r["implementation"] == name}
        heights = [found.get(task(row), 0.0) for row in rows]
        axes.bar([x + i * width for x in range(len(rows))], heights, width, label=name)
    axes.set_xticks([x + 0.4 - width / 2 for x in range(len(rows))], [row["kernel"] for row in rows], rotation=20)
    axes.set(ylabel="GB/s of ideal bytes", title=result["device"])
    axes.legend(fontsize="small", loc="upper right")  # "best" warns where the machine is slow
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    pyplot.close(figure)


def main() -> int:
    """Render the result that was named, or the newest one; return 0 also where there is none."""
    found = sorted((ROOT / "benchmarks/results").glob("gpu-*.json"), key=lambda path: path.stat().st_mtime)
    chosen = [Path(argument) for argument in sys.argv[1:]] or found[-1:]
    for path in chosen:
        render(path)
    print(f"Rendered {chosen[0].name}." if chosen else "There is no result of a GPU: the documents say 'not measured'.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
