"""Collection of the modelled steps: only where Triton is installed, whose launches they count."""

import importlib.util
import os

import pytest

TRITON = importlib.util.find_spec("triton") is not None and os.environ.get("TRITON_INTERPRET") != "1"
collect_ignore_glob = [] if TRITON else ["test_*.py"]


def pytest_report_header(config: pytest.Config) -> str | None:
    """Say why nothing is collected."""
    return None if TRITON else "tests/modelled: not collected, Triton is not installed or interprets"
