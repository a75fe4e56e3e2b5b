"""What benchmarks share: contestants that take turns, and the two files that each benchmark writes.

A benchmark asks one question. `python -m benchmarks.NAME` writes `results/NAME.json`, all that was measured, and
`results/NAME.md`, the table that pages include; `--quick` measures little, and `--results FOLDER` writes elsewhere.
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from examples._report import machine, table

__all__ = ["RESULTS", "machine", "median_ratio", "options", "save", "table", "take_turns"]

RESULTS = Path(__file__).parent / "results"


def options(description: str | None, *, rounds: int = 15) -> argparse.ArgumentParser:
    """Return a parser of what every benchmark takes; with `--quick` it is `rounds` = 1, and sizes are small."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=rounds, help="how often each is measured (default %(default)s)")
    parser.add_argument("--quick", action="store_true", help="measure little: only whether everything runs")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where the files go")
    return parser


def take_turns(
    runs: Mapping[str, Callable[[], object]], rounds: int, *, clock: Callable[[], float] = time.perf_counter
) -> dict[str, list[float]]:
    """Return the seconds of every run in every round; the first calls, which may compile, are not counted.

    In a round each runs once, and who goes first changes, so that other load on the machine affects all of them.
    """
    for run in runs.values():
        run()
    names, found = list(runs), {name: [] for name in runs}
    for number in range(rounds):
        first = number % len(names)
        for name in (*names[first:], *names[:first]):
            start = clock()
            runs[name]()
            found[name].append(clock() - start)
    return found


def median_ratio(one: Sequence[float], other: Sequence[float]) -> float:
    """Return the median over rounds of one's time divided by that of another: it does not depend on the machine."""
    return statistics.median(a / b for a, b in zip(one, other, strict=True))


def save(folder: Path, name: str, result: Mapping[str, Any], text: str) -> None:
    """Print what was measured, and write it as NAME.json and NAME.md."""
    folder.mkdir(parents=True, exist_ok=True)
    content = {**machine(), "load_average": os.getloadavg()[0], **result}
    (folder / f"{name}.json").write_text(json.dumps(content, indent=1) + "\n")
    (folder / f"{name}.md").write_text(f"{text}\n")
    print(text)
