"""The option `--record FILE`: every result is appended to a file at once, so an interrupted run loses none."""

import json
from pathlib import Path


def pytest_addoption(parser):
    parser.addoption("--record", type=Path, help="append a line of JSON about every GPU test to this file")


def pytest_configure(config):
    path = config.getoption("--record", None)
    if path and not hasattr(config, "workerinput"):  # of several processes only the first one writes
        config.pluginmanager.register(Recorder(path))


class Recorder:
    """Appends name, outcome and seconds of every test."""

    def __init__(self, path):
        self.path = path

    def pytest_runtest_logreport(self, report):
        if report.when == "call" or report.outcome != "passed":
            line = {"test": report.nodeid, "outcome": report.outcome, "seconds": round(report.duration, 3)}
            with self.path.open("a") as file:
                file.write(json.dumps(line) + "\n")
