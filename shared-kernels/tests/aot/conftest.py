"""Collection of the compile tests: only where triton is installed and does not interpret."""

import importlib.util
import os

COMPILES = importlib.util.find_spec("triton") is not None and os.environ.get("TRITON_INTERPRET") != "1"
collect_ignore_glob = [] if COMPILES else ["test_*.py"]
# Line numbers in the machine code would differ between checkouts.
os.environ.setdefault("TRITON_DISABLE_LINE_INFO", "1")
# two devices, over which a test spreads an array
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=2"
