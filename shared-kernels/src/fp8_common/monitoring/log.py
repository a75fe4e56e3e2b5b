"""`RunLog` and `read_log`: the log of a run, as JSON lines.

A log can be read while the run is writing to it.
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
"""Format version of the lines, in the key "fp8"."""
KEYS = {"step", "time", "level", "line", "tensors"}
"""Other keys of each line."""
TAIL = 8 * 2**20
"""Number of bytes that are read from the end of a log."""
NAMED = 3
"""Maximum number of reasons in the line of text."""

Scalars = Callable[[dict[str, float], int], Any]
"""Function of numbers by name and the step, such as `wandb.log`."""


class RunLog:
    """Log of FP8 statistics, one JSON line per step.

    Each step is also logged through `logging` as one line of text: at level WARNING if a layer needs attention, else at
    level INFO. If the file cannot be written or `scalars` raises, a warning is logged and training continues, so that
    no single rank stops.

    Args:
        path: File, or folder of the run, in which the file is `fp8.jsonl`. Lines are appended.
        scalars: Function to call with all numbers, named `fp8/<layer>/<tensor>/<statistic>`, and the step.
    """

    def __init__(self, path: str | os.PathLike[str], scalars: Scalars | None = None) -> None:
        self.path, self._scalars, self._failed = log_file(path), scalars, False

    def write(self, step: int, tensors: Mapping[str, TensorStatistics]) -> str:
        """Write the statistics of one step.

        Args:
            step: Number of the step.
            tensors: Statistics by name, `<layer>/<tensor>`.

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
            try:  # if this rank raised, the other ranks would wait for it
                self._scalars(values | {f"fp8/layers_{level}": float(counts[level]) for level in LEVELS}, step)
            except Exception as error:
                logger.warning("FP8: the function for scalars raised %s: %s. Training goes on.", type(error), error)
        return line

    def _append(self, data: bytes) -> None:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a+b") as file:
                # A run that was killed may have written an incomplete line.
                if file.seek(0, os.SEEK_END):
                    file.seek(-1, os.SEEK_END)
                    data = data if file.read(1) == b"\n" else b"\n" + data
                file.write(data)
        except OSError as error:
            if not self._failed:
                logger.warning("FP8: the log %s cannot be written (%s). Training goes on.", self.path, error)
            self._failed = True


def log_file(path: str | os.PathLike[str]) -> Path:
    """Return the log file for the path of a file or folder.

    The result is the path itself if it is a file or ends with `.jsonl`, else `fp8.jsonl` in that folder.
    """
    path = Path(path)
    return path if path.is_file() or (path.suffix == ".jsonl" and not path.is_dir()) else path / FILE


def summary(step: int, judged: Mapping[str, tuple[Level, str]]) -> tuple[Level, str]:
    """Return the level of a step and its line of text.

    Args:
        step: Number of the step.
        judged: Level and reason of each tensor, by name.
    """
    counts = _count_layers(judged)
    worst: Level = max([level for level, _ in judged.values()], key=LEVELS.index, default="ok")
    total = sum(counts.values())
    line = f"step {step}: {total} layer{'s' * (total != 1)}, "
    line += ", ".join(f"{counts[level]} {level}" for level in LEVELS if counts[level] or level == "ok")
    reasons = [
        f"{' '.join(name.rpartition('/')[::2]).strip()} {why}"
        for level in ("act", "look")
        for name, (tensor_level, why) in judged.items()
        if tensor_level == level
    ]
    if reasons:
        more = len(reasons) - NAMED
        line += f": {', '.join(reasons[:NAMED])}{f' and {more} more' * (more > 0)}"
    return worst, line


def _count_layers(judged: Mapping[str, tuple[Level, str]]) -> dict[Level, int]:
    """Return the number of layers at each level.

    The level of a layer is the highest level of its tensors.
    """
    layers: dict[str, Level] = {}
    for name, (level, _) in judged.items():
        layer = name.rpartition("/")[0]
        layers[layer] = max(level, layers.get(layer, "ok"), key=LEVELS.index)
    return {level: sum(layer_level == level for layer_level in layers.values()) for level in LEVELS}


def _numbers(tensor: TensorStatistics) -> dict[str, float | None]:
    """Return the recorded numbers with six significant digits.

    NaN and infinity become None, because JSON does not have them.
    """
    known = {key: value for key, value in dataclasses.asdict(tensor).items() if isinstance(value, float | int)}
    return {key: float(f"{value:.6g}") if math.isfinite(value) else None for key, value in known.items()}


def read_log(path: Path) -> tuple[list[dict[str, Any]], int]:
    """Read the newest records of a log.

    Only the last `TAIL` bytes are read. An unterminated last line is still being written and is skipped. A missing file
    has no records.

    Args:
        path: Log file.

    Returns:
        The records, oldest first, and the number of unreadable lines.
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
