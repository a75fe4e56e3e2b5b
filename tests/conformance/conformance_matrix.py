"""The conformance matrix: counts of compared values, operations down, implementations across."""

import json
from collections.abc import Mapping
from pathlib import Path

Counts = tuple[int, int]
"""Values compared, values different."""
Results = Mapping[tuple[str, str], Counts]
"""By (operation, implementation)."""

COLUMNS = (
    "torch eager",
    "torch.compile",
    "jax eager",
    "jax jit",
    "jax op by op",
    "Triton interpreter",
    "TE formulas",
)
CORNER = "values compared with NumPy"


def add(results: dict[tuple[str, str], Counts], key: tuple[str, str], counts: Counts) -> None:
    """Add counts to a cell."""
    before = results.get(key, (0, 0))
    results[key] = before[0] + counts[0], before[1] + counts[1]


def table(results: Results) -> list[list[str]]:
    """Return the cells of the matrix as text, names included."""
    operations = sorted({operation for operation, _ in results})
    columns = [name for name in COLUMNS if any(name == other for _, other in results)]
    rows = [[name, *(cell_text(results.get((name, column))) for column in columns)] for name in operations]
    return [[CORNER, *columns], *rows]


def cell_text(counts: Counts | None) -> str:
    """Return the text of a cell: the number of values compared, and in capitals how many of them differ."""
    if not counts or not counts[0]:
        return "-" if counts is None else "FAILED"
    return f"{counts[0]:,}" if counts[1] == 0 else f"{counts[0]:,} ({counts[1]:,} DIFFERENT)"


def total(results: Results) -> str:
    """Return the sum of all cells in words."""
    compared, different = (sum(counts[i] for counts in results.values()) for i in (0, 1))
    return f"{compared:,} values compared, {different:,} different"


def as_lines(results: Results) -> list[str]:
    """Return the matrix for a terminal."""
    rows = table(results)
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join([row[0].ljust(widths[0]), *(text.rjust(w) for text, w in zip(row[1:], widths[1:], strict=True))])
        for row in rows
    ]


def as_markdown(results: Results) -> str:
    """Return the matrix for a page."""
    head, *rows = table(results)
    rule = f"|---|{'---:|' * (len(head) - 1)}"
    head, *rows = (f"| {' | '.join(line)} |" for line in [head, *rows])
    return "\n".join([head, rule, *rows])


def load(path: Path) -> dict[tuple[str, str], Counts]:
    """Read what `save` wrote."""
    rows = json.loads(path.read_text())
    return {
        (operation, name): (found[0], found[1]) for operation, cells in rows.items() for name, found in cells.items()
    }


def save(path: Path, results: Results) -> None:
    """Write the cells, one operation a line; cells of other runs that stand in the file stay."""
    merged = (load(path) if path.exists() else {}) | dict(results)
    rows: dict[str, dict[str, Counts]] = {}
    for (operation, name), counts in sorted(merged.items(), key=lambda item: (item[0][0], COLUMNS.index(item[0][1]))):
        rows.setdefault(operation, {})[name] = counts
    lines = (f" {json.dumps(operation)}: {json.dumps(cells)}" for operation, cells in rows.items())
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")
