"""`RunLog` writes JSON lines of logged steps; `read_log` reads them.

Also while the run writes.
"""

import dataclasses
import json
import logging
import math
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fp8_common.monitoring.limits import LEVELS, Level, TensorStatistics, judge

logger = logging.getLogger(__name__)

FILE = "fp8.jsonl"
"""Name of the log in the folder of a run."""
FORMAT = 1
"""Version of the lines."""
KEYS = {"step", "time", "level", "line", "tensors"}
"""Keys of each line."""
TAIL = 8 * 2**20
"""Bytes at the end of a log that are read."""
NAMED = 3
"""How many layers the line of text names."""

Scalars = Callable[[dict[str, float], int], Any]
"""Called with numbers by name and the step, as `wandb.log` is."""


class RunLog:
    """Appends FP8 statistics to a file, a JSON line per step.

    Each step also goes to `logging`, as one line of text: a warning if a layer needs attention, else at level INFO. A
    file that cannot be written and `scalars` that raises are warnings: they end no training and no single rank.

    Args:
        path: The file, or the folder of the run, where the file is `fp8.jsonl`. Lines are appended.
        scalars: Called with all numbers, named `fp8/<layer>/<tensor>/<statistic>`, and the step.
    """

    def __init__(self, path: str | os.PathLike[str], scalars: Scalars | None = None) -> None:
        self.path, self._scalars, self._failed = log_file(path), scalars, False

    def write(self, step: int, tensors: Mapping[str, TensorStatistics]) -> str:
        """Write the statistics of one step.

        Args:
            step: Its number.
            tensors: By name, `<layer>/<tensor>`.

        Returns:
            The line of text.
        """
        judged = {name: judge(tensor) for name, tensor in tensors.items()}
        level, line = summary(step, judged)
        record: dict[str, Any] = {
            "fp8": FORMAT,
            "step": step,
            "time": round(time.time(), 3),
            "level": level,
            "line": line,
        }
        record["tensors"] = {
            name: _numbers(tensor) | {"level": judged[name][0], "why": judged[name][1]}
            for name, tensor in tensors.items()
        }
        self._append((json.dumps(record, allow_nan=False) + "\n").encode())
        logger.log(logging.INFO if level == "ok" else logging.WARNING, "FP8 %s", line)
        if self._scalars is not None:
            values = {
                f"fp8/{name}/{key}": value
                for name, tensor in tensors.items()
                for key, value in dataclasses.asdict(tensor).items()
                if isinstance(value, float)
            }
            counts = _count_layers(judged)
            try:  # other ranks would wait for this one if it raised
                self._scalars(values | {f"fp8/layers_{one}": float(counts[one]) for one in LEVELS}, step)
            except Exception as error:
                logger.warning("FP8: the function for scalars raised %s: %s. Training goes on.", type(error), error)
        return line

    def _append(self, data: bytes) -> None:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a+b") as file:
                # a run that was killed may have left half of a line
                if file.seek(0, os.SEEK_END):
                    file.seek(-1, os.SEEK_END)
                    data = data if file.read(1) == b"\n" else b"\n" + data
                file.write(data)
        except OSError as error:
            if not self._failed:
                logger.warning("FP8: the log %s cannot be written (%s). Training goes on.", self.path, error)
            self._failed = True


def log_file(path: str | os.PathLike[str]) -> Path:
    """Return the log file of a path.

    The path if it is a file or ends with `.jsonl`, else `fp8.jsonl` in it.
    """
    path = Path(path)
    return path if path.is_file() or (path.suffix == ".jsonl" and not path.is_dir()) else path / FILE


def summary(step: int, judged: Mapping[str, tuple[Level, str]]) -> tuple[Level, str]:
    """Return a step's level and its line of text.

    From level and reason of each tensor.
    """
    counts = _count_layers(judged)
    worst: Level = max([level for level, _ in judged.values()], key=LEVELS.index, default="ok")
    total = sum(counts.values())
    line = f"step {step}: {total} layer{'s' * (total != 1)}, "
    line += ", ".join(f"{counts[level]} {level}" for level in LEVELS if counts[level] or level == "ok")
    reasons = [
        f"{' '.join(name.rpartition('/')[::2]).strip()} {why}"
        for level in ("act", "look")
        for name, (own, why) in judged.items()
        if own == level
    ]
    if reasons:
        more = len(reasons) - NAMED
        line += f": {', '.join(reasons[:NAMED])}{f' and {more} more' * (more > 0)}"
    return worst, line


def _count_layers(judged: Mapping[str, tuple[Level, str]]) -> dict[Level, int]:
    """Return the number of layers at each level.

    A layer has the level of its worst tensor.
    """
    layers: dict[str, Level] = {}
    for name, (level, _) in judged.items():
        layer = name.rpartition("/")[0]
        layers[layer] = max(level, layers.get(layer, "ok"), key=LEVELS.index)
    return {level: sum(layer_level == level for layer_level in layers.values()) for level in LEVELS}


def _numbers(tensor: TensorStatistics) -> dict[str, float | None]:
    """Return known numbers in six significant digits.

    None for NaN and infinity, which JSON does not have.
    """
    known = {key: value for key, value in dataclasses.asdict(tensor).items() if isinstance(value, float | int)}
    return {key: float(f"{value:.6g}") if math.isfinite(value) else None for key, value in known.items()}


def read_log(path: Path) -> tuple[list[dict[str, Any]], int]:
    """Return a log's newest records, and the unreadable lines' count.

    Oldest first.

    A last line without its end is still being written, and is left out. A missing file has no records.

    Args:
        path: The file.
    """
    try:
        with path.open("rb") as file:
            start = max(0, file.seek(0, os.SEEK_END) - TAIL)
            file.seek(start)
            lines = file.read().split(b"\n")[bool(start) : -1]
    except FileNotFoundError:
        return [], 0
    records, unreadable = [], 0
    for line in filter(None, lines):
        try:
            record = json.loads(line)
        except ValueError:
            record = None
        if isinstance(record, dict) and record.get("fp8") == FORMAT and record.keys() >= KEYS:
            records.append(record)
        else:
            unreadable += 1
    return records, unreadable
