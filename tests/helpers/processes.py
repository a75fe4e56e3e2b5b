"""Programs that tests run in a process of their own, some of them with a GPU that is pretended."""

import os
import subprocess
import sys

import pytest

from benchmarks.modelled import pretended_gpu
from tests.helpers.repository import ROOT

on_a_pretended_gpu = pytest.mark.skipif(pretended_gpu.obstacle() is not None, reason=str(pretended_gpu.obstacle()))


def python(*arguments: object) -> str:
    """Run Python at the root of the repository and return what it prints; a failure shows all that it said.

    It imports what this process imports, `tests.helpers` too.
    """
    command, env = [sys.executable, *map(str, arguments)], os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
