"""The built site for tests: its pages, the identifiers in them and their links."""

import ast
import json
from collections.abc import Iterable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

from tests.helpers.repository import ROOT, packages

SITE = ROOT / "site"
PARTS = (
    "fp8_common.torch",
    "fp8_common.jax",
    "fp8_common.testing",
    "fp8_jax_owg.linen",
    "fp8_jax_owg.nnx",
    "fp8_jax_owg.optax",
)
"""Modules that users import from, besides the packages themselves."""


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


def clicks(found: dict[Path, Page]) -> dict[Path, int]:
    """Return how many links lead from the landing page to each page; pages that none leads to are left out."""
    away = {SITE / "index.html": 0}
    waiting = list(away)
    for path in waiting:
        for link in found[path].links:
            url = urlsplit(link)
            place = (path.parent / unquote(url.path)).resolve() if url.path else path
            file = place / "index.html" if place.is_dir() else place
            if not (url.scheme or url.netloc) and file in found and file not in away:
                away[file] = away[path] + 1
                waiting.append(file)
    return away


def far(found: dict[Path, Page], most: int = 2) -> Iterator[str]:
    """Yield every page that takes more than `most` clicks, or that no link leads to."""
    away = clicks(found)
    for path in found:
        if path.name != "404.html" and away.get(path, most + 1) > most:
            yield f"{path.relative_to(SITE)} is more than {most} clicks from the landing page"


def not_found(searches: Iterable[str]) -> Iterator[str]:
    """Yield every search whose words are not together in one part of a page, as the site's index has it."""
    index = json.loads((SITE / "search.json").read_text())
    parts = [f"{item['title']} {item['text']}".lower() for item in index["items"]]
    for words in searches:
        if not any(all(word in part for word in words.lower().split()) for part in parts):
            yield f"a search for {words!r} finds nothing"


def undocumented(found: dict[Path, Page]) -> Iterator[str]:
    """Yield every public name that has no place of its own in the reference."""
    targets = set().union(*(page.targets for page in found.values()))
    modules = [package.source.name for package in packages().values()]
    for module in [*modules, *PARTS]:
        for name in public_names(module):
            if targets.isdisjoint(homes(f"{module}.{name}")):
                yield f"{module}.{name} is not in the reference: add it to docs/reference"


def public_names(module: str) -> list[str]:
    """Return what `__all__` of a module holds, but for dunder names."""
    for node in source_of(module).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return [name for name in ast.literal_eval(node.value) if not name.startswith("__")]
    return []


def homes(name: str) -> Iterator[str]:
    """Yield a full name and the one it has where it was imported from, and so on."""
    yield name
    module, _, last = name.rpartition(".")
    for node in ast.walk(source_of(module)):
        if isinstance(node, ast.ImportFrom) and any(alias.name == last for alias in node.names):
            yield from homes(f"{node.module}.{last}")


def source_of(module: str) -> ast.Module:
    """Return the syntax tree of a module of this repository; an empty one for others."""
    top, *rest = module.split(".")
    roots = [package.source for package in packages().values() if package.source.name == top]
    for root in roots:
        place = root.joinpath(*rest)
        for file in (place / "__init__.py", place.with_suffix(".py")):
            if file.exists():
                return ast.parse(file.read_text())
    return ast.Module([], [])
