"""Runs `fp8-bench` as `python -m fp8_common.bench`."""

import sys

from fp8_common.bench.command import main

if __name__ == "__main__":
    sys.exit(main())
