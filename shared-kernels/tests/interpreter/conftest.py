"""Fixtures for tests of kernels under Triton's interpreter (TRITON_INTERPRET=1 before triton is imported)."""

import os

import pytest

INTERPRETS = os.environ.get("TRITON_INTERPRET") == "1"
collect_ignore_glob = [] if INTERPRETS else ["test_*.py"]


@pytest.fixture(autouse=True)
def kernels_on_cpu(request, monkeypatch):
    """Send CPU tensors to the kernels and make the interpreter exact; tests marked `as_shipped` see it as it is."""
    from tests.helpers.interpreter import exact_interpreter

    monkeypatch.setenv("FP8_COMMON_BACKEND", "triton")
    if "as_shipped" in request.node.name:
        yield
        return
    with exact_interpreter():
        yield
