"""Decides how the rest of the package reads a primary weight of this package."""

import torch

from fp8_te_init.sources.base import Rows
from fp8_te_init.state import PrimaryState


class NativeRows:
    """The rows of a `PrimaryFloat8Weight` that this rank holds; a `QuantizedRows`.

    Args:
        state: What is known about its storage.
        dtype: The dtype that it stands for.
    """

    def __init__(self, state: PrimaryState, dtype: torch.dtype) -> None:
        self._state, self._dtype = state, dtype

    @property
    def rows(self) -> Rows:
        """Which rows of the whole weight."""
        first = min(self._state.first_row, self._state.full_shape[0])
        return Rows(first, first + self._state.rows)

    @property
    def full_shape(self) -> torch.Size:
        """[rows, columns] of the whole weight."""
        return self._state.full_shape

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that the weight stands for."""
        return self._dtype

    def codes(self) -> torch.Tensor:
        """Return uint8 [n, columns], to read."""
        return self._state.own_codes

    def values(self) -> torch.Tensor:
        """Return float32 [n, columns], dequantized."""
        return self._state.own_values()

    def quantized(self, values: torch.Tensor) -> torch.Tensor:
        """Return uint8 codes of high-precision values [n, columns] with the present scales."""
        return self._state.quantized(values)
