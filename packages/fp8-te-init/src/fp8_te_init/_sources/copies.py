"""`CopySource`: values copied to the host, pageable, or page-locked for a GPU to read."""

import logging
from functools import cache
from typing import ClassVar

import torch

from fp8_te_init._host_memory import mapped_copy
from fp8_te_init._rows import Rows
from fp8_te_init._sources.base import QuantizedRows, Source

logger = logging.getLogger(__name__)


class CopySource(Source):
    """A host copy, 2 or 4 bytes per element.

    Args:
        copy: [n, columns] on the host.
        rows: The rows that it holds.
    """

    name: ClassVar[str] = "cpu"

    def __init__(self, copy: torch.Tensor, rows: Rows) -> None:
        self._copy, self.rows = copy, rows

    @classmethod
    def of(cls, values: torch.Tensor, rows: Rows, *, pinned: bool = False) -> "CopySource":
        """Copy values [n, columns] that are on any device."""
        pin = pinned and _can_pin()
        kind = PinnedSource if pin else cls
        return kind(mapped_copy(values.detach(), pin=pin), rows)

    @property
    def nbytes(self) -> int:
        """Bytes of the copy."""
        return self._copy.nbytes

    def values(self, quantized: QuantizedRows) -> torch.Tensor:
        """Return the copy itself."""
        return self._copy

    def narrowed(self, rows: Rows) -> "CopySource":
        """Copy some rows to pages of their own, so that the whole copy can be freed."""
        part = self._copy[rows.inside(self.rows)]
        # A slice would keep all of the memory of the whole copy.
        return type(self)(mapped_copy(part, pin=self._copy.is_pinned()), rows)


class PinnedSource(CopySource):
    """A host copy in page-locked memory."""

    name: ClassVar[str] = "pinned"


@cache
def _can_pin() -> bool:
    if torch.cuda.is_available():
        return True
    logger.warning('preserve="pinned" needs CUDA, and there is none here: the copies are pageable ("cpu").')
    return False
