"""Eight CPU devices for JAX, results rounded where programs say so, and tests in two processes."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

DEVICES = 8
# XLA reads this when its first array is made, after all tests were collected.
FLAGS = {
    "xla_force_host_platform_device_count": str(DEVICES),
    # bfloat16 results are rounded wherever the program says so, or two programs of one meaning differ in bits
    "xla_allow_excess_precision": "false",
    # these tests compile more than they compute
    "xla_backend_optimization_level": "0",
    "xla_llvm_disable_expensive_passes": "true",
}
for name, value in FLAGS.items():
    if name not in os.environ.get("XLA_FLAGS", ""):
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --{name}={value}"


@pytest.fixture(scope="session")
def devices():
    """Eight CPU devices."""
    import jax

    found = jax.devices("cpu")
    assert len(found) == DEVICES, "something used JAX while tests were being collected: make arrays in tests only"
    return found


@pytest.fixture
def in_two_processes():
    """A function that runs a script of this folder as two JAX processes, and returns what each printed."""

    def run(script, devices):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        flags = f"--xla_force_host_platform_device_count={devices}"  # of each, whatever this process was told
        environment = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
        command = [sys.executable, str(Path(__file__).with_name(script))]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        processes = [subprocess.Popen([*command, str(rank), str(port)], env=environment, **pipes) for rank in (0, 1)]
        try:
            outputs = [process.communicate(timeout=500) for process in processes]
        finally:
            for process in processes:
                process.kill()
        errors = "\n".join(error[-2000:] for _, error in outputs)
        assert [process.returncode for process in processes] == [0, 0], errors
        return [output for output, _ in outputs]

    return run
