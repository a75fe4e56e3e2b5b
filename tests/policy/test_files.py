"""No tracked file holds a path or a package index of some machine."""

import re

import pytest

from tests.helpers.repository import ROOT, tracked_files

PLACE = re.compile(r"""(?:^|[\s"'=:(\[])/(?:work|root|home|Users|opt|mnt)/[\w.-]""", re.MULTILINE)
INDEX = re.compile(r"https?://[\w.-]*(?:pypi|pythonhosted|devpi|artifactory|download\.pytorch)\b[\w.-]*")
CONFIGURED = re.compile(r"(?:index-url|find-links)[= ]+(?:https?:|file:|/)")
PYTORCH = "https://" + "download.pytorch.org"


def texts() -> dict[str, str]:
    found = {}
    for path in tracked_files():
        content = path.read_bytes()
        if b"\0" not in content:
            found[str(path.relative_to(ROOT))] = content.decode()
    return found


@pytest.mark.parametrize("pattern", [PLACE, CONFIGURED], ids=["paths", "settings"])
def test_no_file_knows_the_machine_it_was_written_on(pattern):
    found = {name: match[0].strip() for name, text in texts().items() if (match := pattern.search(text))}
    assert found == {}


def test_only_the_package_index_module_names_an_index():
    found = {(name, host) for name, text in texts().items() for host in INDEX.findall(text)}
    assert found == {("tools/package_index.py", PYTORCH)}


def test_files_are_small_and_real():
    assert [str(path) for path in tracked_files() if path.is_symlink()] == []
    sizes = {str(path.relative_to(ROOT)): path.stat().st_size for path in tracked_files()}
    assert {name: size for name, size in sizes.items() if size > 2_000_000} == {}


@pytest.mark.parametrize(
    ("text", "pattern"),
    [
        ("see " + "/home" + "/me/x", PLACE),
        ('path = "' + "/work" + '/main"', PLACE),
        ("--index-" + "url https://example.com", CONFIGURED),
        ("https://" + "pypi" + ".org/simple", INDEX),
    ],
)
def test_the_patterns_find_what_they_are_for(text, pattern):
    assert pattern.search(text)
