"""`Rows`: the part of a whole weight that a rank holds: some rows, and of these all columns or some."""

from typing import NamedTuple


class Rows(NamedTuple):
    """Rows `start` to `stop`, excluded, of a whole weight.

    Attributes:
        start: Index of the first row.
        stop: Index after the last row.
        columns: First column and the one after the last; None for all, wherever columns are not cut.
    """

    start: int
    stop: int
    columns: tuple[int, int] | None = None

    @property
    def count(self) -> int:
        """How many rows."""
        return self.stop - self.start

    def inside(self, other: "Rows | None" = None) -> tuple[slice, ...]:
        """Return the index of this part in data that holds the part `other`, by default the whole weight."""
        first_row = 0 if other is None else other.start
        rows = slice(self.start - first_row, self.stop - first_row)
        if self.columns is None:
            return (rows,)
        first = other.columns[0] if other is not None and other.columns is not None else 0
        return rows, slice(self.columns[0] - first, self.columns[1] - first)

    def lies_in(self, other: "Rows") -> bool:
        """Return whether all of this part is in another one."""
        if not other.start <= self.start <= self.stop <= other.stop:
            return False
        if other.columns is None or self.columns == other.columns:
            return True
        return self.columns is not None and other.columns[0] <= self.columns[0] <= self.columns[1] <= other.columns[1]
