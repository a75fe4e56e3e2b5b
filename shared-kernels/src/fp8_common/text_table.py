"""`aligned`: rows of text with aligned columns."""

from collections.abc import Sequence


def aligned(lines: Sequence[Sequence[str]], indent: str = "") -> list[str]:
    """Return lines of text with aligned columns.

    Args:
        lines: Rows of cells. The last column is not padded.
        indent: Prefix of each line.
    """
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)][:-1]
    return [
        indent + "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[-1]]).rstrip()
        for row in lines
    ]
