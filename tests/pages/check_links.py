"""The check of the built site: links lead somewhere, everything is described, near and found by a search."""

import sys

from tests.pages.site_pages import dead_links, far, not_found, pages, undocumented

SEARCHES = ("bf16 mixed precision", "convert_to_float8_training", "gradient clipping", "torchao", "nothing got faster")
"""What people look for, as they write it."""


def main() -> None:
    """Print what is wrong and exit with 1, or say what was checked."""
    found = pages()
    wrong = list(dead_links(found))
    wrong += [f"{page.path}: {source} has no description" for page in found.values() for source in page.undescribed]
    if found:
        wrong += [*undocumented(found), *far(found), *not_found(SEARCHES)]
    if wrong or not found:
        sys.exit("\n".join(wrong or ["There is no site: run nox -s docs first."]))
    print(f"{len(found)} pages, {sum(len(page.links) for page in found.values())} links, all good")


if __name__ == "__main__":
    main()
