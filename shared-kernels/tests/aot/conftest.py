"""Collection of the compile tests: only where triton is installed and does not interpret."""

import importlib.util
import os

COMPILES = importlib.util.find_spec("triton") is not None and os.environ.get("TRITON_INTERPRET") != "1"
collect_ignore_glob = [] if COMPILES else ["test_*.py"]
# Line numbers in the machine code would differ between checkouts.
os.environ.setdefault("TRITON_DISABLE_LINE_INFO", "1")
