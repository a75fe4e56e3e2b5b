"""What scripts write into pages: text between two marks, nothing else of the page."""


def between_marks(page: str, begin: str, end: str, text: str) -> str:
    """Return a page with other text between two marks, each of which stands on a line of its own.

    Raises:
        ValueError: A mark is missing.
    """
    begin, end = begin.strip(), end.strip()
    before, found, rest = page.partition(f"{begin}\n")
    _, closed, after = rest.partition(end)
    if not (found and closed):
        raise ValueError(f"The page lacks {end if found else begin!r}; put text between both marks by hand once.")
    return f"{before}{begin}\n{text}\n{end}{after}"
