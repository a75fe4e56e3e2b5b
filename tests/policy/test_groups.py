"""Tests of one xdist group run in one process of a parallel run."""

import os
import subprocess
import sys


def test_grouped_tests_run_in_one_process(tmp_path):
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "test_some.py").write_text(
        "import pytest\n"
        "@pytest.mark.xdist_group('together')\n"
        "@pytest.mark.parametrize('case', range(4))\n"
        "def test_one(case): pass\n"
    )
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    command = [sys.executable, "-m", "pytest", "-v", "-n", "2", "--dist", "loadgroup", "-p", "no:cacheprovider"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    passed = [line for line in done.stdout.splitlines() if "PASSED" in line and "@together" in line]
    assert len(passed) == 4, f"this pytest keeps pytest-xdist from grouping tests:\n{done.stdout}"
