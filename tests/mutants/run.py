"""Decides whether the tests find every mistake of the list: `python -m tests.mutants.run [PART OF A NAME ...]`.

Each mutant is made in a copy of the tracked files, never here, and its tests run there. A mutant that survives, a line
that no longer stands where the list says, and tests that fail without any mutant are all errors.
"""

import argparse
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.helpers.repository import ROOT, packages, tracked_files
from tests.mutants.mutants import MUTANTS, Mutant


def copy_to(folder: Path) -> None:
    """Copy the tracked files."""
    for path in tracked_files():
        target = folder / path.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(path, target)


def passes(folder: Path, tests: str, interpreted: bool) -> bool:
    """Return whether tests pass in a copy; with `interpreted`, Triton interprets there.

    Raises:
        RuntimeError: There was nothing to run, or pytest could not run it.
    """
    sources = [str(folder / package.source.parent.relative_to(ROOT)) for package in packages().values()]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sources), "PYTHONDONTWRITEBYTECODE": "1"}
    if interpreted:
        environment["TRITON_INTERPRET"] = "1"
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests.split()]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if done.returncode not in (0, 1, 2):
        raise RuntimeError(f"pytest {tests}: {done.stdout[-2000:]}{done.stderr[-2000:]}")
    return done.returncode == 0


def survives(folder: Path, mutant: Mutant) -> bool:
    """Make one mistake in the copy, run its tests, and undo it.

    Raises:
        LookupError: The right line does not stand there exactly once.
    """
    file = folder / mutant.file
    text = file.read_text()
    if text.count(mutant.right) != 1:
        raise LookupError(f"{mutant.file} holds {text.count(mutant.right)} times: {mutant.right!r}. Update mutants.py.")
    try:
        file.write_text(text.replace(mutant.right, mutant.wrong))
        return passes(folder, mutant.tests, mutant.interpreted)
    finally:
        file.write_text(text)


def main() -> None:
    """Print a line for each mutant; exit with 1 if one survives."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", help="run only mutants whose mistake or file contains one of these")
    wanted = parser.parse_args().parts
    chosen = [m for m in MUTANTS if not wanted or any(part in f"{m.mistake} {m.file}" for part in wanted)]
    if any(mutant.interpreted for mutant in chosen) and importlib.util.find_spec("triton") is None:
        sys.exit("Mistakes in kernels need triton, which is not installed here: use session `mutants`.")
    survivors = []
    with tempfile.TemporaryDirectory() as name:
        copy_to(Path(name))
        for tests, interpreted in sorted({(mutant.tests, mutant.interpreted) for mutant in chosen}):
            if not passes(Path(name), tests, interpreted):
                sys.exit(f"pytest {tests} fails without any mutant: mend that first.")
        for mutant in chosen:
            start = time.monotonic()
            alive = survives(Path(name), mutant)
            print(
                f"{'SURVIVES' if alive else 'killed'}  {mutant.mistake}  ({time.monotonic() - start:.0f} s)", flush=True
            )
            survivors += [mutant.mistake] * alive
    if survivors or not chosen:
        sys.exit(f"{len(survivors)} of {len(chosen)} survive: {', '.join(survivors)}")
    print(f"{len(chosen)} mutants, all killed")


if __name__ == "__main__":
    main()
