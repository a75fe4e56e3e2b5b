"""Two JAX processes on one machine: the state of a pipelined step equals that of one process."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("owg_two_processes.py")


@pytest.mark.distributed
@pytest.mark.timeout(600)
def test_two_processes_equal_one():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # one device in each process, whatever this one was told
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=1", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, str(SCRIPT)]
    children = [
        subprocess.Popen(
            [*command, str(rank), str(port)], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    try:
        results = [child.communicate(timeout=500) for child in children]
    finally:
        for child in children:
            child.kill()
    assert [child.returncode for child in children] == [0, 0], results[0][1][-2000:] + results[1][1][-2000:]
    found = json.loads(results[0][0].splitlines()[-1])
    assert found["equal"] == {"stage": True, "data": True}
    assert found["seen"] == found["wanted"]
