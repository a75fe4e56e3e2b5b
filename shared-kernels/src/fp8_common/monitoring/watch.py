"""`watch`: shows the log of a run in a terminal.

The table is drawn by rich if that is installed.
"""

import contextlib
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from fp8_common.errors import Fp8Error
from fp8_common.monitoring.limits import LEVELS, percent
from fp8_common.monitoring.log import log_file, read_log
from fp8_common.text_table import aligned

COLOURS = {"ok": ("green", 32), "look": ("yellow", 33), "act": ("red", 31)}
"""Color of each level: its name for rich, and its ANSI code."""
MARKS = {"ok": ".", "look": "?", "act": "!"}
"""Mark of each level in the column "lately"."""
COLUMNS = ("level", "layer", "tensor", "amax", "scale", "saturated", "underflowed", "lately", "why")
RECENT = 12
"""Number of logged steps in the column "lately"."""
PAUSE = 1.0
"""Seconds between two reads of the file."""

Row = tuple[str, ...]


def watch(path: str, *, once: bool = False) -> int:
    """Show the newest step of a log, once or live.

    The live view runs until the user interrupts it. If stdout is no terminal, it prints the line of each new step.

    Args:
        path: Log file, or the folder that contains it.
        once: Whether to print the newest step and return.

    Returns:
        Exit code: 1 if `once` is set and a layer needs action, else 0.

    Raises:
        Fp8Error: If `once` is set and the log does not exist or has no step.
    """
    file = log_file(path)
    if once:
        records, unreadable = read_log(file)
        if not records:
            problem = f"holds no step yet (unreadable lines: {unreadable})" if file.exists() else "does not exist"
            raise Fp8Error(f"The log {file} {problem}. Float8Log, or OwgLog in JAX, writes it after the first step.")
        rows = _rows(records)
        lines = aligned([COLUMNS, *rows])
        if sys.stdout.isatty():
            lines = [lines[0], *(_coloured(row[0], line) for row, line in zip(rows, lines[1:], strict=True))]
        sys.stdout.write("\n".join([_title(str(file), records, unreadable), *lines]) + "\n")
        return int(records[-1]["level"] == "act")
    with contextlib.suppress(KeyboardInterrupt), _display() as show:
        while True:
            show(str(file), *read_log(file))
            time.sleep(PAUSE)
    return 0


def _title(file: str, records: Sequence[dict[str, Any]], unreadable: int) -> str:
    """Return the first line: file, newest step and its age."""
    if not records:
        return f"{file}: waiting for the first step"
    age = max(0, round(time.time() - records[-1]["time"]))
    ago = f"{age} s" if age < 120 else f"{age // 60} min" if age < 7200 else f"{age // 3600} h"
    return f"{file}: {records[-1]['line']} ({ago} ago{f', unreadable lines: {unreadable}' * bool(unreadable)})"


def _rows(records: Sequence[dict[str, Any]]) -> list[Row]:
    """Return a row of `COLUMNS` for each tensor, the most urgent first."""
    rows = []
    for name, tensor in records[-1]["tensors"].items():
        layer, _, kind = name.rpartition("/")
        before = [record["tensors"].get(name, {}).get("level") for record in records[-RECENT:]]
        numbers = (_number(tensor, key, lambda n: f"{n:.3g}") for key in ("amax", "scale"))
        shares = (_number(tensor, key, percent) for key in ("saturated", "underflowed"))
        lately = "".join(MARKS.get(level, " ") for level in before)
        rows.append((tensor["level"], layer or "the model", kind, *numbers, *shares, lately, tensor["why"]))
    return sorted(rows, key=lambda row: -LEVELS.index(row[0]))


def _number(tensor: dict[str, Any], key: str, text: Callable[[float], str]) -> str:
    if key not in tensor:
        return "-"
    return "not finite" if tensor[key] is None else text(tensor[key])


def _coloured(level: str, line: str) -> str:
    return f"\x1b[{COLOURS[level][1]}m{line}\x1b[0m"


@contextlib.contextmanager
def _display() -> Iterator[Callable[[str, list[dict[str, Any]], int], None]]:
    """Yield a function that shows the records of a file.

    On a terminal it redraws a table, with rich if installed. Otherwise it prints the line of each new record.
    """
    shown = [-1.0]

    def print_new(file: str, records: list[dict[str, Any]], unreadable: int) -> None:
        new = [record for record in records if record["time"] > shown[0]]
        sys.stdout.write("".join(f"{record['line']}\n" for record in new))
        sys.stdout.flush()
        shown[0] = max([shown[0], *(record["time"] for record in new)])

    def redraw(file: str, records: list[dict[str, Any]], unreadable: int) -> None:
        rows, hidden = _fitting(records)
        size = shutil.get_terminal_size()
        lines = [line[: size.columns] for line in aligned([COLUMNS, *rows])]
        lines = [lines[0], *(_coloured(row[0], line) for row, line in zip(rows, lines[1:], strict=True))]
        text = "\n".join([_title(file, records, unreadable)[: size.columns], *lines, *hidden])
        sys.stdout.write(f"\x1b[H\x1b[J{text}\n")
        sys.stdout.flush()

    if not sys.stdout.isatty():
        yield print_new
        return
    try:
        from rich.console import Group
        from rich.live import Live
        from rich.table import Table
        from rich.text import Text
    except ImportError:
        yield redraw
        return
    with Live(auto_refresh=False) as live:

        def update(file: str, records: list[dict[str, Any]], unreadable: int) -> None:
            rows, hidden = _fitting(records)
            table = Table(*COLUMNS, box=None)
            for row in rows:
                table.add_row(*map(Text, row), style=COLOURS[row[0]][0])
            live.update(Group(Text(_title(file, records, unreadable)), table, *map(Text, hidden)), refresh=True)

        yield update


def _fitting(records: list[dict[str, Any]]) -> tuple[list[Row], list[str]]:
    """Return the rows that fit on the terminal.

    The second result is empty, or a line with the number of other rows.
    """
    rows = _rows(records) if records else []
    room = max(1, shutil.get_terminal_size().lines - 5)
    return rows[:room], [f"and {len(rows) - room} more"] if len(rows) > room else []
