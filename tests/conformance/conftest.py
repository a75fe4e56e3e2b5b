"""Decides how conformance is reported: one table at the end, with the values compared and different."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # importlib mode adds no folder; the table stands in its own modules

PROPERTY = "conformance"
RESULTS = pytest.StashKey[dict[tuple[str, str], tuple[int, int]]]()


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
                before = self.results.get((operation, implementation), (0, 0))
                self.results[operation, implementation] = (before[0] + compared, before[1] + different)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print the table."""
    results = config.stash[RESULTS]
    if not results:
        return
    operations = sorted({operation for operation, _ in results})
    implementations = sorted({implementation for _, implementation in results})
    compared, different = (sum(counts[i] for counts in results.values()) for i in (0, 1))
    rows = [["values compared with NumPy", *implementations]]
    rows += [[name, *(_cell(results.get((name, other))) for other in implementations)] for name in operations]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    terminalreporter.section("conformance")
    for row in rows:
        first, *rest = (
            cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        )
        terminalreporter.line("  ".join([first, *rest]))
    terminalreporter.line(f"{compared} values compared, {different} different")


def _cell(counts: tuple[int, int] | None) -> str:
    if not counts or not counts[0]:
        return "-" if counts is None else "FAILED"
    return f"{counts[0]}" if counts[1] == 0 else f"{counts[0]} ({counts[1]} DIFFERENT)"
