"""`ReplaySource`: values made again by repeating what made them; nothing per element is stored.

Exact on the same kind of device. Random numbers differ between a CPU and a GPU, and may differ between GPU models.
"""

from typing import ClassVar

import torch

from fp8_te_init._init_replay import InitReplay
from fp8_te_init._rows import Rows
from fp8_te_init._sources.base import QuantizedRows, Source


class ReplaySource(Source):
    """Initialisation operators and the generator's state: about 5 kB for a weight of any size on a CPU.

    Args:
        replay: What makes the values.
        columns: Columns of the weight.
        dtype: Dtype of the values.
        rows: The rows that this source gives.
    """

    name: ClassVar[str] = "replay"

    def __init__(self, replay: InitReplay, columns: int, dtype: torch.dtype, rows: Rows) -> None:
        self._replay, self._columns, self._dtype, self.rows = replay, columns, dtype, rows

    @property
    def replay(self) -> InitReplay:
        """The operators; an initialisation may go on where they end."""
        return self._replay

    @property
    def nbytes(self) -> int:
        """Bytes of generator states."""
        return self._replay.nbytes

    def values(self, quantized: QuantizedRows) -> torch.Tensor:
        """Make the values again, all rows that were drawn together, and return some; the global generator stays."""
        # All rows, since the generator reaches the numbers of the last ones through those of the first alone.
        return self._replay.play(self._columns, self._dtype)[self.rows.inside(self._replay.rows)]

    def narrowed(self, rows: Rows) -> "ReplaySource":
        """Return the source of some rows."""
        return ReplaySource(self._replay, self._columns, self._dtype, rows)
