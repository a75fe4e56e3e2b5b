"""Decides how values are kept by repeating what made them: nothing per element is stored.

Exact on the same kind of device. Random numbers differ between a CPU and a GPU, and may differ between GPU models.
"""

from typing import ClassVar

import torch

from fp8_te_init._sources.base import QuantizedRows, Rows, Source
from fp8_te_init._tape import Tape


class ReplaySource(Source):
    """Initialisation operators and the generator's state: about 5 kB for a weight of any size on a CPU.

    Args:
        tape: What makes the values.
        columns: Columns of the weight.
        dtype: Dtype of the values.
        rows: The rows that this source gives.
    """

    name: ClassVar[str] = "replay"

    def __init__(self, tape: Tape, columns: int, dtype: torch.dtype, rows: Rows) -> None:
        self._tape, self._columns, self._dtype, self.rows = tape, columns, dtype, rows

    @property
    def tape(self) -> Tape:
        """The operators; an initialisation may go on where they end."""
        return self._tape

    @property
    def nbytes(self) -> int:
        """Bytes of generator states."""
        return self._tape.nbytes

    def values(self, quantized: QuantizedRows) -> torch.Tensor:
        """Make the values again, all rows that were drawn together, and return some; the global generator stays."""
        return self._tape.play(self._columns, self._dtype)[self.rows.inside(Rows(*self._tape.rows))]

    def narrowed(self, rows: Rows) -> "ReplaySource":
        """Return the source of some rows."""
        return ReplaySource(self._tape, self._columns, self._dtype, rows)
