"""The packages, source files and tracked files of this repository, for tests of its rules."""

import functools
import subprocess
import tomllib
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
def packages() -> dict[str, Package]:
    """Return every package of the checkout by its distribution's name, fp8-common first."""
    folders = [ROOT / "shared-kernels", *sorted(path.parent for path in ROOT.glob("packages/*/pyproject.toml"))]
    found = {}
    for folder in folders:
        config = tomllib.loads((folder / "pyproject.toml").read_text())
        name = config["project"]["name"]
        found[name] = Package(folder, name, name.replace("-", "_"), config)
    return found


@functools.cache
def tracked_files() -> list[Path]:
    """Return the files of the checkout that git holds or would take, in order."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    listing = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    paths = (ROOT / name for name in sorted(set(listing.split("\0"))) if name)
    return [path for path in paths if path.is_file()]
