"""Two JAX processes on one machine: steps and FP8 all-gathers equal those of one process."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.distributed
@pytest.mark.timeout(600)
def test_steps_and_gathers_over_two_processes_equal_those_of_one():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    flags = "--xla_force_host_platform_device_count=2"  # of each, whatever this process was told
    command = [sys.executable, str(Path(__file__).with_name("two_processes.py"))]
    settings = {"env": os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}, "text": True}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    processes = [subprocess.Popen([*command, str(rank), str(port)], **settings, **pipes) for rank in (0, 1)]
    try:
        outputs = [process.communicate(timeout=500) for process in processes]
    finally:
        for process in processes:
            process.kill()
    errors = "\n".join(error[-2000:] for _, error in outputs)
    assert [process.returncode for process in processes] == [0, 0], errors
    for output, _ in outputs:
        assert json.loads(output.splitlines()[-1]) == {"step": True, "codes": True}
