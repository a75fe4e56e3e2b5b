"""The check of built distributions before publishing: `python -m tests.release.check_wheels dist`.

Every package has one wheel and one sdist of the same version. A wheel is small, pure Python, carries its licence and
its types, no tests, and asks for nothing but what its pyproject.toml says.
"""

import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

from tests.helpers.repository import Package, packages

MAX_WHEEL = 350 * 1024


def complaints(package: Package, dist: Path) -> Iterator[str]:
    """Yield a sentence for everything that is wrong with the distributions of one package."""
    stem = f"{package.module}-{package.config['project']['version']}"
    wheel, sdist = dist / f"{stem}-py3-none-any.whl", dist / f"{stem}.tar.gz"
    for path in (wheel, sdist):
        if not path.is_file():
            yield f"{path.name} is not there: build the packages first."
    if wheel.is_file():
        yield from wheel_complaints(package, wheel, stem)
    if sdist.is_file():
        with tarfile.open(sdist) as archive:
            names = {name.partition("/")[2] for name in archive.getnames()}
        yield from (
            f"{sdist.name} has no {name}" for name in ("pyproject.toml", "LICENSE", "README.md") if name not in names
        )


def wheel_complaints(package: Package, wheel: Path, stem: str) -> Iterator[str]:
    """Yield a sentence for everything that is wrong with a wheel."""
    if (size := wheel.stat().st_size) > MAX_WHEEL:
        yield f"{wheel.name} has {size} bytes; at most {MAX_WHEEL} are allowed. Look for data that belongs elsewhere."
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        metadata = archive.read(f"{stem}.dist-info/METADATA").decode()
    for wanted in (f"{package.module}/__init__.py", f"{package.module}/py.typed", f"{stem}.dist-info/licenses/LICENSE"):
        if wanted not in names:
            yield f"{wheel.name} has no {wanted}"
    strange = {name.partition("/")[0] for name in names} - {package.module, f"{stem}.dist-info"}
    if strange or any("/tests/" in name for name in names):
        yield f"{wheel.name} holds more than the package: {sorted(strange) or 'tests'}"
    asked = {line.removeprefix("Requires-Dist: ") for line in metadata.splitlines() if line.startswith("Requires-Dist")}
    plain = {line for line in asked if "extra ==" not in line}
    if len(plain) != len(package.config["project"]["dependencies"]):
        yield f"{wheel.name} asks for {sorted(plain)}; pyproject.toml for {package.config['project']['dependencies']}"


def main(dist: Path) -> None:
    """Print what is wrong and exit with 1, or a line for every wheel."""
    if wrong := [what for package in packages().values() for what in complaints(package, dist)]:
        sys.exit("\n".join(wrong))
    for wheel in sorted(dist.glob("*.whl")):
        print(f"{wheel.name}: {wheel.stat().st_size / 1024:.0f} KiB")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
