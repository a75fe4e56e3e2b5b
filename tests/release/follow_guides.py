"""A newcomer's way, in empty environments: `python -m tests.release.follow_guides [PART OF A NAME ...]`.

1. Guides: each gets what its `pip install` lines name, and nothing else; packages of this repository come from their
   folders. Its Python blocks run in order in one process, its programs before and after a change each in its own.
2. Notebooks: the same, with what the first cell says that it needs.

The time of each is printed. `tests/test_first_hour.py` follows the README.
"""

import os
import re
import shlex
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tests.helpers.repository import ROOT, packages
from tests.pages import notebooks, programs

GUIDES = ROOT / "docs" / "guides"
INSTALL = re.compile(r"^ *\$ pip install (.+)$", re.MULTILINE)
BLOCK = re.compile(r"^( *)```python\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
NOT_HERE = {"transformer_engine", "deepspeed"}
"""What programs before a change import and guides do not install: they need a GPU."""


class Case(NamedTuple):
    """Something to follow: what to install, and the programs to run afterwards."""

    name: str
    wanted: list[str]
    programs: list[str]


def installs(page: str) -> list[str]:
    """Return what the `pip install` lines of a page name, packages of this repository as their folders."""
    wanted = []
    for line in INSTALL.findall(page):
        wanted += [from_folder(word) for word in shlex.split(line)]
    return wanted


def from_folder(word: str) -> str:
    """Return a requirement with the folder of its package in the place of a name of this repository."""
    folders = {name: str(package.folder) for name, package in packages().items()}
    name, bracket, extras = word.partition("[")
    return folders.get(name, name) + bracket + extras


def program(page: str) -> str:
    """Return all Python blocks of a page as one program."""
    return "\n\n".join(textwrap.dedent(code) for _, code in BLOCK.findall(page))


def runnable(page: str) -> list[str]:
    """Return every program of a page that an environment without a GPU can run."""
    found = [program(page), *(side for change in programs.changes(page) for side in (change.before, change.after))]
    return [code for code in found if code.strip() and NOT_HERE.isdisjoint(programs.NEEDS.findall(code))]


def cases() -> Iterator[Case]:
    """Yield everything that can be followed."""
    for path in sorted(GUIDES.glob("*.md")):
        page = path.read_text()
        if code := runnable(page):
            yield Case(path.name, installs(page), code)
    for path in notebooks.NOTEBOOKS:
        wanted = [from_folder(word) for word in notebooks.PACKAGES[path.stem]]
        yield Case(path.name, wanted, [notebooks.program(path)])


def complaints(case: Case, folder: Path) -> Iterator[str]:
    """Follow one case in a folder of its own; yield what went wrong."""
    if not case.wanted:
        yield f"{case.name} has programs and no `$ pip install` line"
        return
    python = folder / "environment" / ("Scripts" if os.name == "nt" else "bin") / "python"
    commands = [
        ["uv", "venv", "--quiet", f"--python={sys.executable}", str(folder / "environment")],
        ["uv", "pip", "install", "--quiet", f"--python={python}", *common(case.wanted), *case.wanted],
    ]
    for number, code in enumerate(case.programs):
        script = folder / f"program-{number}.py"
        script.write_text(code)
        commands.append([str(python), "-I", str(script)])
    for command in commands:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        if done.returncode:
            yield f"{case.name}: {' '.join(command[:3])} failed\n{done.stderr[-2000:]}"
            return


def common(wanted: list[str]) -> list[str]:
    """Return fp8-common's folder, unless it is named: plugins want its own version, which no index has yet."""
    named = any("fp8-common" in one or str(packages()["fp8-common"].folder) in one for one in wanted)
    return [] if named else [str(packages()["fp8-common"].folder)]


def main() -> None:
    """Print a line for each case that was followed; exit with 1 if one cannot be."""
    failed = 0
    for case in cases():
        if len(sys.argv) > 1 and not any(part in case.name for part in sys.argv[1:]):
            continue
        start = time.monotonic()
        with tempfile.TemporaryDirectory() as name:
            wrong = list(complaints(case, Path(name)))
        failed += len(wrong)
        print("\n".join(wrong) or f"{case.name}: followed in {time.monotonic() - start:.0f} s", flush=True)
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
