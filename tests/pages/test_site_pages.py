"""The checks of the built site find the errors that they are for."""

import pytest

from tests.helpers.repository import packages
from tests.pages import site_pages
from tests.pages.site_pages import SITE, Page


@pytest.fixture
def page(tmp_path, monkeypatch):
    """A site of one page, from its HTML."""
    monkeypatch.setattr(site_pages, "SITE", tmp_path)

    def write(html):
        path = tmp_path / "index.html"
        path.write_text(html)
        return {path: Page(path)}

    return write


@pytest.mark.parametrize(
    ("html", "told"),
    [
        ('<h1 id="a"></h1><a href="#a"></a>', []),
        ('<a href="#b"></a>', ["index.html: #b has no such heading"]),
        ('<img src="no.png" alt="x">', ["index.html: no.png is no file"]),
        ('<a href="https://example.com/no"></a>', []),
    ],
)
def test_dead_links(page, html, told):
    assert list(site_pages.dead_links(page(html))) == told


def test_pictures_without_a_description(page):
    (found,) = page('<img src="a.png"><img src="b.png" alt="b">').values()
    assert found.undescribed == ["a.png"]


def test_a_name_is_at_home_wherever_it_was_imported_from():
    assert list(site_pages.homes("fp8_jax_owg.quantize")) == [
        "fp8_jax_owg.quantize",
        "fp8_common.jax.quantize",
        "fp8_common.jax._dispatch.quantize",
    ]


def test_pages_that_are_far_or_unreachable_are_told(tmp_path, monkeypatch):
    monkeypatch.setattr(site_pages, "SITE", tmp_path)
    links = {"index": "a/", "a": "../b/#x", "b": "../c/", "c": "https://example.com/", "alone": ""}
    for name, link in links.items():
        path = tmp_path / ("index.html" if name == "index" else f"{name}/index.html")
        path.parent.mkdir(exist_ok=True)
        path.write_text(f'<a href="{link}"></a>')
    told = list(site_pages.far(site_pages.pages()))
    assert [line.partition(" is ")[0] for line in told] == ["alone/index.html", "c/index.html"]


def test_a_search_finds_words_that_stand_in_one_part(tmp_path, monkeypatch):
    monkeypatch.setattr(site_pages, "SITE", tmp_path)
    (tmp_path / "search.json").write_text(
        '{"items": [{"title": "A Whole", "text": "bf16"}, {"title": "mixed", "text": ""}]}'
    )
    assert list(site_pages.not_found(["whole bf16", "bf16 mixed"])) == ["a search for 'bf16 mixed' finds nothing"]


def test_names_without_a_place_are_told(page):
    told = list(site_pages.undocumented(page('<h2 id="fp8_common.Format"></h2>')))
    assert not any("fp8_common.Format is" in line for line in told)
    assert "fp8_common.quantize is not in the reference: add it to docs/reference" in told


def test_every_module_of_the_list_has_public_names():
    assert SITE.name == "site"
    for module in [*(package.source.name for package in packages().values()), *site_pages.PARTS]:
        assert site_pages.public_names(module), module
