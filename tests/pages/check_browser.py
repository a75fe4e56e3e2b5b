"""The built site in a real browser, at the widths of a desktop and a phone.

For every page and width: no error on the console, no request that failed, every picture drawn, one visible heading, and
nothing that sticks out to the side. Pictures of the pages go to the folder that is named on the command line.
"""

import functools
import http.server
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.pages.site_pages import SITE, pages

WIDTHS = {"desktop": 1280, "phone": 390}
LOOK = """() => {
  const wide = [...document.querySelectorAll('article *')].filter(e =>
    e.getBoundingClientRect().right > innerWidth + 1 &&
    !e.closest('pre, .md-typeset__scrollwrap, .md-typeset__table, .tabbed-labels, svg'));
  return {
    overflow: document.documentElement.scrollWidth - innerWidth,
    wide: wide.slice(0, 3).map(e => e.tagName + ' ' + e.textContent.slice(0, 40)),
    blank: [...document.images].filter(i => i.complete && !i.naturalWidth).map(i => i.src),
    headings: [...document.querySelectorAll('h1')].filter(h => h.offsetHeight > 0).length,
    text: document.querySelector('article')?.innerText.length ?? 0,
    copied: [...document.querySelectorAll('.highlight code')].map(code => {
      code.setAttribute('data-md-copying', '');  // as the copy button does
      const text = code.innerText;
      code.removeAttribute('data-md-copying');
      return text;
    }).filter(text => /^[$] /m.test(text)).slice(0, 2),
  };
}"""


class Quiet(http.server.SimpleHTTPRequestHandler):
    """Serves the site without writing a line for each request."""

    def log_message(self, *args: object) -> None:
        """Say nothing."""


def serve() -> str:
    """Serve the site on a free port for as long as the process lives; return its address."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(SITE)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return f"http://127.0.0.1:{server.server_port}/"


def complaints(page: Any, address: str) -> Iterator[str]:
    """Open one page and yield a sentence for everything that is wrong with it."""
    heard: list[str] = []
    page.on("console", lambda message: heard.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: heard.append(str(error)))
    page.on("response", lambda answer: heard.append(f"{answer.status} {answer.url}") if answer.status >= 400 else None)
    page.goto(address, wait_until="load")
    page.evaluate("scrollTo(0, document.body.scrollHeight)")
    page.wait_for_timeout(50)
    page.evaluate("scrollTo(0, 0)")
    seen = page.evaluate(LOOK)
    yield from heard
    if seen["overflow"] > 0 or seen["wide"]:
        yield f"sticks out by {seen['overflow']} pixels: {seen['wide']}"
    if seen["copied"]:
        yield f"the copy button takes prompts along: {seen['copied']}"
    if seen["blank"]:
        yield f"pictures not drawn: {seen['blank']}"
    if seen["headings"] != 1 or seen["text"] < 40:
        yield f"{seen['headings']} visible headings, {seen['text']} characters of text"


def main(chromium: str, pictures: Path) -> None:
    """Look at every page at every width; exit with 1 if something is wrong."""
    from playwright.sync_api import sync_playwright

    address, wrong, files = serve(), [], [path for path in pages() if path.name != "404.html"]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for device, width in WIDTHS.items():
            for file in files:
                name = file.parent.relative_to(SITE).as_posix()
                page = browser.new_page(viewport={"width": width, "height": 900})
                wrong += [f"{device} {name}: {what}" for what in complaints(page, f"{address}{name}/")]
                page.screenshot(path=pictures / f"{device}-{name.replace('/', '-')}.png", full_page=True)
                page.close()
        browser.close()
    if wrong or not files:
        sys.exit("\n".join(wrong or ["There is no site: run nox -s docs first."]))
    print(f"{len(files)} pages at {len(WIDTHS)} widths, all good; pictures in {pictures}")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
