"""The kernels against NumPy in a process of their own, because importing triton fixes whether it interprets."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conformance import conformance_matrix as matrix

ABSENT = importlib.util.find_spec("triton") is None


@pytest.mark.timeout(3000)
@pytest.mark.skipif(ABSENT, reason="triton is not installed here; session `interpreter` compares the kernels")
def test_the_kernels_equal_numpy_where_triton_interprets(tmp_path, record_property):
    path = tmp_path / "matrix.json"
    file = Path(__file__).with_name("test_conformance.py")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--conformance-json={path}", str(file)]
    done = subprocess.run(
        command, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    for (operation, implementation), counts in matrix.load(path).items():
        record_property("conformance", (operation, implementation, *counts))
