"""Text tables, and numbers written as text or as strict JSON, for the `fp8` command."""

import math
from collections.abc import Sequence
from typing import Any


def table(rows: Sequence[Sequence[str]], indent: str = "") -> list[str]:
    """Return the rows as lines with aligned columns; the last column is left as it is."""
    if not rows:
        return []
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)]
    return [
        indent + "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[-1]]).rstrip()
        for row in rows
    ]


def number(value: float) -> str:
    """Return a float for people: nine significant digits, which tell all float32 values apart."""
    return f"{value:.9g}"


def json_ready(value: Any) -> Any:
    """Return `value` with infinities and NaN, which strict JSON lacks, as strings."""
    if isinstance(value, dict):
        return {key: json_ready(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_ready(item) for item in value]
    return value if not isinstance(value, float) or math.isfinite(value) else str(value)
