"""The guides, run in empty environments: `python -m tests.release.follow_guides [PART OF A NAME ...]`.

For each guide a new, empty environment gets what the guide's `pip install` lines name, and nothing else; packages of
this repository come from their folders. Then the guide's Python blocks run there, in order, in one process.
"""

import os
import re
import shlex
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path

from tests.helpers.repository import ROOT, packages

GUIDES = ROOT / "docs" / "guides"
INSTALL = re.compile(r"^ *\$ pip install (.+)$", re.MULTILINE)
BLOCK = re.compile(r"^( *)```python\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)


def installs(page: str) -> list[str]:
    """Return what the `pip install` lines of a page name, packages of this repository as their folders."""
    folders = {name: str(package.folder) for name, package in packages().items()}
    wanted = []
    for line in INSTALL.findall(page):
        for word in shlex.split(line):
            name, bracket, extras = word.partition("[")
            wanted.append(folders.get(name, name) + bracket + extras)
    return wanted


def program(page: str) -> str:
    """Return all Python blocks of a page as one program."""
    return "\n\n".join(textwrap.dedent(code) for _, code in BLOCK.findall(page))


def complaints(path: Path, folder: Path) -> Iterator[str]:
    """Follow one guide in a folder of its own; yield what went wrong."""
    page = path.read_text()
    code, wanted = program(page), installs(page)
    if not code:
        return
    if not wanted:
        yield f"{path.name} has Python blocks and no `$ pip install` line"
        return
    python = folder / "environment" / ("Scripts" if os.name == "nt" else "bin") / "python"
    script = folder / "guide.py"
    script.write_text(code)
    # a package of this repository brings fp8-common at its own version, which no index has yet
    common = [] if any(str(packages()["fp8-common"].folder) in one for one in wanted) else ["shared-kernels"]
    for command in (
        ["uv", "venv", "--quiet", f"--python={sys.executable}", str(folder / "environment")],
        ["uv", "pip", "install", "--quiet", f"--python={python}", *[f"{ROOT}/{one}" for one in common], *wanted],
        [str(python), "-I", str(script)],
    ):
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        if done.returncode:
            yield f"{path.name}: {' '.join(command[:3])} failed\n{done.stderr[-2000:]}"
            return


def main() -> None:
    """Print a line for each guide that was followed; exit with 1 if one cannot be."""
    failed = 0
    for path in sorted(GUIDES.glob("*.md")):
        if len(sys.argv) > 1 and not any(part in path.name for part in sys.argv[1:]):
            continue
        with tempfile.TemporaryDirectory() as name:
            wrong = list(complaints(path, Path(name)))
        failed += len(wrong)
        print("\n".join(wrong) or f"{path.name}: followed", flush=True)
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
