"""Sites of several versions lie side by side, and the newest is shown first."""

import json

from tools import pages, versions


def test_a_version_is_added_and_replaced(tmp_path):
    site, folder = tmp_path / "site", tmp_path / "served"
    site.mkdir()
    (site / "index.html").write_text("old")
    for version in ("0.9.0", "0.10.0", "0.2.0"):
        versions.add(site, folder, version)
    (site / "index.html").write_text("new")
    assert versions.add(site, folder, "0.9.0") == ["0.10.0", "0.9.0", "0.2.0"]
    assert [one["version"] for one in json.loads((folder / "versions.json").read_text())] == [
        "0.10.0",
        "0.9.0",
        "0.2.0",
    ]
    assert 'url=0.10.0/"' in (folder / "index.html").read_text()
    read = {path.parent.name: path.read_text() for path in folder.glob("*/index.html")}
    assert read == {"0.9.0": "new", "0.10.0": "old", "0.2.0": "old"}


def test_a_site_with_an_address_has_a_menu_of_versions(monkeypatch):
    monkeypatch.setattr(pages, "addresses", lambda: {"repository": "", "site": "https://example.com/docs/"})
    monkeypatch.setattr(pages, "version", lambda: "0.3.0")
    address, menu = pages.site().splitlines()
    assert address == "site_url: https://example.com/docs/0.3.0/", "where this version lies"
    assert menu == "extra: { version: { provider: mike } }"
