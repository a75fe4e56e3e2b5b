"""Tests that run where Triton interprets: TRITON_INTERPRET=1, set before triton is imported."""

import os

import pytest

collect_ignore_glob = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["test_*.py"]


@pytest.fixture(autouse=True)
def exact():
    """Make Triton's interpreter round as the hardware does."""
    from tests.helpers.interpreter import exact_interpreter

    with exact_interpreter():
        yield
