"""A plugin of pytest, `-p benchmarks._gpu_record`: `--record FILE`, and an end to processes whose GPU is lost.

Every result is appended to the file at once, so an interrupted run loses none. A CUDA error stays with its process and
would fail every later test there: the process writes down its test and ends. xdist starts another one.
"""

import json
import os
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

MESSAGE = 3000
"""Characters of a failure that are kept, its last ones."""
LOST = ("CUDA error", "device-side assert", "illegal memory access")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option."""
    parser.addoption("--record", type=Path, help="append a line of JSON about every test to this file")


def pytest_configure(config: pytest.Config) -> None:
    """Begin to record; of several processes the first one does, which hears of all results."""
    path = config.getoption("--record")
    if path and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Recorder(path))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo) -> Generator[None, Any, Any]:
    """End this process after a CUDA error."""
    report = yield
    path = item.config.getoption("--record")
    if path and call.excinfo is not None and any(sign in str(call.excinfo.value) for sign in LOST):
        write(path, report)
        os._exit(1)
    return report


def write(path: Path, report: pytest.TestReport) -> None:
    """Append the line of one result."""
    line: dict[str, Any] = {"test": report.nodeid, "outcome": report.outcome, "seconds": round(report.duration, 3)}
    if report.outcome == "failed":
        line["message"] = report.longreprtext[-MESSAGE:]
    if report.user_properties:
        line["noted"] = dict(report.user_properties)
    with path.open("a") as file:
        file.write(json.dumps(line) + "\n")


class Recorder:
    """Appends every result."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Append it, but not that a process ended which has written so itself."""
        ended = report.outcome == "failed" and "crashed while running" in report.longreprtext
        known = ended and self.path.exists() and report.nodeid in self.path.read_text()
        if (report.when == "call" or report.outcome != "passed") and not known:
            write(self.path, report)
