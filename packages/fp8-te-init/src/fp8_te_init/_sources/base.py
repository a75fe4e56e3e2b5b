"""`Source`: what every source of high-precision values can do."""

import abc
from typing import ClassVar, Literal, Protocol

import torch

from fp8_common import Format
from fp8_te_init._rows import Rows

Preserve = Literal["cpu", "pinned", "residual", "replay", "none"]


class QuantizedRows(Protocol):
    """The FP8 rows that a rank holds of one weight, whatever made them: what backends show to sources."""

    @property
    def rows(self) -> Rows:
        """Which rows (and columns) of the whole weight."""

    @property
    def full_shape(self) -> torch.Size:
        """[rows, columns] of the whole weight."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that the weight stands for."""

    @property
    def fmt(self) -> Format:
        """The format of the codes."""

    def codes(self) -> torch.Tensor:
        """Return uint8 [n, columns], to read."""

    def values(self) -> torch.Tensor:
        """Return float32 [n, columns], dequantized, on the device of the codes."""

    def scale_inv(self) -> torch.Tensor:
        """Return float32 scales back from FP8 that broadcast to [n, columns]."""

    def quantized(self, values: torch.Tensor) -> torch.Tensor:
        """Return uint8 codes of high-precision values [n, columns] with the present scales."""


class Source(abc.ABC):
    """Gives the high-precision values of some rows of a weight, now or later.

    Attributes:
        name: What users call this kind.
        cuts_columns: Whether it can be narrowed to some columns.
        rows: The rows (and columns) of the whole weight.
    """

    name: ClassVar[str]
    cuts_columns: ClassVar[bool] = True
    rows: Rows

    @property
    @abc.abstractmethod
    def nbytes(self) -> int:
        """Bytes kept in memory."""

    @abc.abstractmethod
    def values(self, quantized: QuantizedRows) -> torch.Tensor:
        """Return [n, columns] in the dtype of the start, on any device; not to be written to.

        Args:
            quantized: The weight as it is now.

        Raises:
            StaleInitError: The weight changed in a way that this source cannot follow.
        """

    @abc.abstractmethod
    def narrowed(self, rows: Rows) -> "Source":
        """Return the source of some of these rows, which keeps nothing of the others."""

    def copied(self) -> "Source":
        """Return a source for a copy of the weight; sources are never written to, so they can be shared."""
        return self
