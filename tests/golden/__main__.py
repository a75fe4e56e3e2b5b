"""Writes the golden vectors, or checks them: `python -m tests.golden [--check]`."""

import argparse
import sys
from collections.abc import Sequence

from tests.golden.cases import build
from tests.golden.store import FILE, compare, load, write


def main(argv: Sequence[str] | None = None) -> int:
    """Write or check the vectors; return 0, or 1 if a check found differences."""
    parser = argparse.ArgumentParser(prog="python -m tests.golden", description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare what NumPy computes with the file; write nothing")
    options = parser.parse_args(argv)
    cases = build()
    if not options.check:
        write(cases, FILE)
        sys.stdout.write(f"Wrote {len(cases)} cases to {FILE}.\n")
        return 0
    problems = compare(load(), cases)
    for problem in problems:
        sys.stdout.write(problem + "\n")
    sys.stdout.write(f"{len(cases)} cases computed, {len(problems)} problem(s).\n")
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
