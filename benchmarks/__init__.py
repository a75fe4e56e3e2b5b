"""Benchmarks and pictures, each a program: `python -m benchmarks.NAME` in the root of a checkout.

Where the packages are not installed, as on a borrowed machine, their sources of this checkout are imported.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCES = [str(path) for path in (ROOT / "shared-kernels/src", *sorted(ROOT.glob("packages/*/src")))]
sys.path += SOURCES  # at the end: what is installed comes first
