"""The conformance report: one matrix at the end of a run, with the values compared and different."""

import importlib.util
from pathlib import Path

import pytest

from tests.conformance import conformance_matrix as matrix

PROPERTY = "conformance"
KERNELS = "Triton interpreter"
RESULTS = pytest.StashKey[dict[tuple[str, str], matrix.Counts]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--conformance-json`."""
    parser.addoption("--conformance-json", type=Path, help="Put the cells of the conformance matrix into this file.")


def pytest_configure(config: pytest.Config) -> None:
    """Start with an empty table."""
    config.stash[RESULTS] = {}
    config.pluginmanager.register(_Collector(config), "conformance-collector")


class _Collector:
    """Adds up what the tests recorded; with pytest-xdist the reports of all workers arrive here."""

    def __init__(self, config: pytest.Config) -> None:
        self.results = config.stash[RESULTS]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Take the counts of a finished test."""
        for name, value in report.user_properties if report.when == "call" else ():
            if name == PROPERTY:
                operation, implementation, compared, different = value
                matrix.add(self.results, (operation, implementation), (compared, different))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print the matrix, and write it where that was asked for."""
    results = config.stash[RESULTS]
    if not results:
        return
    terminalreporter.section("conformance")
    for line in [*matrix.as_lines(results), matrix.total(results)]:
        terminalreporter.line(line)
    if not any(implementation == KERNELS for _, implementation in results):
        terminalreporter.line(f"{KERNELS}: {why_no_kernels()}")
    # the option exists only if this folder was named on the command line
    if path := config.getoption("conformance_json", default=None):
        matrix.save(path, results)


def why_no_kernels() -> str:
    """Say why there is no column for the kernels."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed here; session `interpreter` compares the kernels."
    return "test_kernels_child.py, which compares the kernels, was not among the tests that ran."
