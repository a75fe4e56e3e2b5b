"""Parts of pages that follow from data are up to date, and programs before and after a change run."""

import re
import tomllib

import pytest

from tests.helpers.repository import ROOT
from tests.pages import programs
from tools import pages

OTHERS = {"modelled", "measured"}
"""Parts that renderers of benchmarks write."""
FILES = list(pages.files())
CHANGES = [
    (f"{path.stem}-{number}", change)
    for path in sorted((ROOT / "docs/guides").glob("*.md"))
    for number, change in enumerate(programs.changes(path.read_text()))
]

TABS = list(programs.tabs((ROOT / "docs/guides/jax-owg.md").read_text()))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_parts_are_up_to_date(path):
    text = path.read_text()
    assert pages.rendered(text) == text, "run python -m tools.pages"
    assert {match[3] for match in pages.PART.finditer(text)} <= pages.PARTS.keys() | OTHERS


def test_every_part_is_somewhere():
    found = {match[3] for path in FILES for match in pages.PART.finditer(path.read_text())}
    assert pages.PARTS.keys() - found == set()


def test_words_of_pages_about_gpus_are_those_of_the_status():
    """Sentences that no renderer writes: they go when a GPU has been measured."""
    measured = [d["key"] for d in pages.read_status()["devices"] if "measured" in str(d["status"])]
    nothing = re.compile(r"[Nn]othing has run on a\s+GPU|[Oo]n a? ?GPUs? nothing")
    texts = [*FILES, *ROOT.glob("packages/*/README.md")]
    said = {str(path.relative_to(ROOT)) for path in texts if nothing.search(path.read_text())}
    assert (measured == ["cpu"]) == bool(said), f"{measured} are measured, and {said} say that nothing is"


def test_metadata_and_site_name_the_repository_once_it_has_an_address(monkeypatch):
    monkeypatch.setattr(pages, "addresses", lambda: {"repository": "https://example.com/r", "site": ""})
    assert tomllib.loads(pages.urls())["project"]["urls"] == {"Repository": "https://example.com/r"}
    assert pages.site() == "repo_url: https://example.com/r"


@pytest.mark.parametrize("change", [change for _, change in CHANGES], ids=[name for name, _ in CHANGES])
@pytest.mark.parametrize("when", ["before", "after"])
def test_programs_before_and_after_a_change_run(change, when):
    program = getattr(change, when)
    compile(program, when, "exec")
    if absent := programs.missing(program):
        pytest.skip(f"{', '.join(absent)} is not installed: the program is compiled and not run")
    printed = programs.run(program, when)
    if when == "after" and change.output is not None:
        assert programs.complaint(change.output, printed) is None


@pytest.mark.parametrize("program", [code for _, code in TABS], ids=[name.replace(" ", "-") for name, _ in TABS])
def test_a_tab_is_a_program_of_its_own(program):
    assert "falling: True" in programs.run(program, "tab")


def test_a_block_of_differences_is_two_programs():
    (change,) = programs.changes("```diff\n a = 1\n-b = 2\n+b = 3\n\n print(a + b)\n```\n\n```output\n4\n```\n")
    assert (change.before, change.after) == ("a = 1\nb = 2\n\nprint(a + b)\n", "a = 1\nb = 3\n\nprint(a + b)\n")
    assert programs.complaint(change.output, programs.run(change.after, "after")) is None
    assert programs.complaint(change.output, programs.run(change.before, "before")) is not None
    assert programs.changed(change) == 1
