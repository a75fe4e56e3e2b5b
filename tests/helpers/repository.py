"""The packages, source files and tracked files of this repository, for tests of its rules."""

import ast
import functools
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]


class Package(NamedTuple):
    """One installable package: its folder, the name it is installed and imported by, its pyproject.toml."""

    folder: Path
    name: str
    module: str
    config: dict[str, Any]

    @property
    def source(self) -> Path:
        """The folder that is imported."""
        return self.folder / "src" / self.module


@functools.cache
def packages(root: Path = ROOT) -> dict[str, Package]:
    """Return every package of a checkout by its distribution's name, fp8-common first."""
    folders = [
        root / "shared-kernels",
        *sorted(path.parent for path in root.glob("packages/*/pyproject.toml")),
    ]
    found = {}
    for folder in folders:
        config = tomllib.loads((folder / "pyproject.toml").read_text())
        name = config["project"]["name"]
        found[name] = Package(folder, name, name.replace("-", "_"), config)
    return found


@functools.cache
def tracked_files(root: Path = ROOT) -> list[Path]:
    """Return the files of a checkout that git holds or would take, in order."""
    listing = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=root,
        check=True,
        capture_output=True,
        text=True,
    )
    paths = (root / name for name in sorted(set(listing.stdout.split("\0"))) if name)
    return [path for path in paths if path.is_file()]


def sources(package: Package) -> Iterator[tuple[str, ast.Module]]:
    """Yield every source file of a package: its path below `src`, and its syntax tree."""
    for path in sorted(package.source.rglob("*.py")):
        yield str(path.relative_to(package.folder / "src")), ast.parse(path.read_text())
