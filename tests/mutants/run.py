"""Session `mutants`: each mistake of the list is made, and its tests run.

    python -m tests.mutants.run [--check] [PART OF A NAME ...]

Each mutant is made in a copy of the tracked files, never here, and its tests run there. A mutant that survives, one
whose place is not found (`--check` looks for the places alone), and tests that fail without any mutant are all errors.
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
from tests.mutants.apply import UnfitError, mutated
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
        UnfitError: The mutant has no place.
    """
    source, text = mutated(mutant)
    file = folder / source.relative_to(ROOT)
    right = file.read_text()
    try:
        file.write_text(text)
        return passes(folder, mutant.tests, mutant.interpreted)
    finally:
        file.write_text(right)


def check(chosen: list[Mutant]) -> None:
    """Print why mutants have no place, and exit with 1 if any has none."""
    unfit = []
    for mutant in chosen:
        try:
            mutated(mutant)
        except UnfitError as error:
            unfit.append(str(error))
    sys.exit("\n\n".join(unfit) if unfit else None)


def main() -> None:
    """Print a line for each mutant; exit with 1 if one survives."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "parts", nargs="*", help="run only mutants whose mistake, function or tests contain one of these"
    )
    parser.add_argument("--check", action="store_true", help="only look for the places of the mistakes")
    options = parser.parse_args()
    wanted = options.parts
    named = {f"{mutant.mistake} {mutant.function} {mutant.tests}": mutant for mutant in MUTANTS}
    chosen = [mutant for text, mutant in named.items() if not wanted or any(part in text for part in wanted)]
    if options.check:
        check(chosen)
        return
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
