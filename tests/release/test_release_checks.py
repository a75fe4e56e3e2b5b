"""The checks before a release find the errors that they are for."""

import io
import tarfile
import zipfile
from contextlib import nullcontext

import pytest

from tests.helpers.repository import packages
from tests.release import check_changelog, check_wheels

COMMON = packages()["fp8-common"]
VERSION = COMMON.config["project"]["version"]
STEM = f"fp8_common-{VERSION}"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("## [1.2.3] - 2026-01-31\n", None),
        ("## [1.2.3] - unreleased\n", "unreleased"),
        ("## [1.3.0] - 2026-01-31\n## [1.2.3] - 2026-01-01\n", "begins with 1.3.0"),
        ("nothing yet\n", "begins with nothing"),
    ],
)
def test_the_changelog_must_be_dated(text, found):
    wrong = check_changelog.complaint("1.2.3", text)
    assert wrong is None if found is None else found in wrong


@pytest.mark.parametrize(
    ("tag", "text", "said"),
    [
        (f"v{VERSION}", f"## [{VERSION}] - 2026-01-31\n", None),
        ("v99.0.0", f"## [{VERSION}] - 2026-01-31\n", "The tag v99.0.0 is not the version"),
        (f"v{VERSION}", f"## [{VERSION}] - unreleased\n", "Write the date"),
        (None, f"## [{VERSION}] - unreleased\n", None),
        (None, "## [99.0.0] - 2026-01-31\n", "begins with 99.0.0"),
    ],
)
def test_a_tag_must_be_the_version_and_dated(tag, text, said, tmp_path, monkeypatch):
    (tmp_path / "CHANGELOG.md").write_text(text)
    monkeypatch.setattr(check_changelog, "ROOT", tmp_path)
    with nullcontext() if said is None else pytest.raises(SystemExit, match=said):
        check_changelog.main(tag)


def write(dist, extra=(), without=(), size=0):
    """Write a wheel and an sdist of fp8-common that are right but for what the arguments say."""
    requirements = "".join(f"Requires-Dist: {name}\n" for name in COMMON.config["project"]["dependencies"])
    files = {
        "fp8_common/__init__.py": b"x" * size,
        "fp8_common/py.typed": b"",
        f"{STEM}.dist-info/licenses/LICENSE": b"",
        f"{STEM}.dist-info/METADATA": requirements.encode(),
        **dict.fromkeys(extra, b""),
    }
    with zipfile.ZipFile(dist / f"{STEM}-py3-none-any.whl", "w") as wheel:
        for name in files.keys() - set(without):
            wheel.writestr(name, files[name])
    with tarfile.open(dist / f"{STEM}.tar.gz", "w:gz") as sdist:
        for name in {"pyproject.toml", "LICENSE", "README.md"} - set(without):
            sdist.addfile(tarfile.TarInfo(f"{STEM}/{name}"), io.BytesIO())


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({}, []),
        ({"without": ["fp8_common/py.typed"]}, ["has no fp8_common/py.typed"]),
        ({"without": [f"{STEM}.dist-info/licenses/LICENSE"]}, ["licenses/LICENSE"]),
        ({"without": ["README.md"]}, ["has no README.md"]),
        ({"extra": ["tests/conftest.py"]}, ["holds more than the package"]),
        ({"size": 400_000}, [f"at most {check_wheels.MAX_WHEEL} are allowed"]),
    ],
)
def test_a_wheel_is_small_and_whole(tmp_path, options, found):
    write(tmp_path, **options)
    wrong = list(check_wheels.complaints(COMMON, tmp_path))
    assert len(wrong) == len(found)
    assert all(part in sentence for part, sentence in zip(found, wrong, strict=True))


def test_missing_distributions_are_named(tmp_path):
    assert len(list(check_wheels.complaints(COMMON, tmp_path))) == 2
