"""Each figure of a measurement in index and guides equals what its file says."""

import pytest

from tests.helpers.repository import ROOT
from tests.pages import figures

PAGES = [ROOT / "docs/index.md", *sorted((ROOT / "docs/guides").glob("*.md"))]
CLAIMS = [(path.name, claim) for path in PAGES for claim in figures.claims(path.read_text())]


@pytest.mark.parametrize("claim", [c for _, c in CLAIMS], ids=[f"{name}: {claim.text}" for name, claim in CLAIMS])
def test_a_figure_is_what_its_file_says(claim):
    assert claim.text in claim.paragraph, f"The paragraph does not say {claim.text}: {claim.paragraph}"
    value = figures.value_of(claim)
    assert figures.is_rounded(claim.text, value), f"{claim.file} says {value}, the page {claim.text}"


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_every_figure_has_an_origin(path):
    assert figures.without_origin(path.read_text()) == [], "name the file in a comment: see tests/pages/figures.py"


def test_the_checks_find_what_they_are_for():
    page = '<!-- figures of a.json\n1.5 % = 100 * of["x"]\n-->\nIt is 1.5 % of\nall, and 2.4x faster.\n\nAlso 3 ms.\n'
    (claim,) = figures.claims(page)
    assert claim == ("1.5 %", "a.json", '100 * of["x"]', "It is 1.5 % of all, and 2.4x faster.")
    assert figures.without_origin(page) == ["2.4x", "3 ms"]
    assert figures.without_origin(page.replace("\nAlso", "\n<!-- not kept: 2.4x, 3 ms (once) -->\nAlso")) == []
    assert figures.is_rounded("1.5 %", 1.549)
    assert not figures.is_rounded("1.5 %", 1.551)
    assert not figures.is_rounded("+1.5 %", -1.5)
    assert figures.without_origin("```\n3 ms\n```\n| 3 ms |\n<!-- demo: begin -->\n3 ms\n<!-- demo: end -->\n") == []
