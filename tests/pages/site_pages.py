"""Decides how the built site is read by tests: its pages, their targets and what they point to."""

from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

from repository import ROOT

SITE = ROOT / "site"


class Page(HTMLParser):
    """One HTML file: the identifiers that can be linked to, and every link, picture and script in it."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        self.targets: set[str] = set()
        self.links: list[str] = []
        self.undescribed: list[str] = []
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Collect what matters of one element."""
        values = dict(attrs)
        self.targets |= {value for name in ("id", "name") if (value := values.get(name))}
        self.links += [value for name in ("href", "src") if (value := values.get(name))]
        if tag == "img" and not values.get("alt"):
            self.undescribed.append(values.get("src") or "?")


def pages() -> dict[Path, Page]:
    """Return every page of the built site by its file."""
    return {path: Page(path) for path in sorted(SITE.rglob("*.html"))}


def dead_links(found: dict[Path, Page]) -> Iterator[str]:
    """Yield one sentence for each link within the site that leads nowhere."""
    for page in found.values():
        for link in page.links:
            url = urlsplit(link)
            if url.scheme or url.netloc or page.path.name == "404.html":
                continue
            place = (page.path.parent / unquote(url.path)).resolve() if url.path else page.path
            file = place / "index.html" if place.is_dir() else place
            where = page.path.relative_to(SITE)
            if not file.exists():
                yield f"{where}: {link} is no file"
            elif url.fragment and file in found and unquote(url.fragment) not in found[file].targets:
                yield f"{where}: {link} has no such heading"
