"""`Requantizable`: what the rest of the package can do with an FP8 weight of any make."""

from typing import Protocol

import torch

from fp8_te_init._own_cast import OwnCast
from fp8_te_init._sources.base import QuantizedRows


class Requantizable(QuantizedRows, Protocol):
    """FP8 rows that can also be given new values."""

    @property
    def device(self) -> torch.device:
        """Where the codes are."""

    def pending(self) -> torch.Tensor | None:
        """Return values [n, columns] that were written and wait for a scale that the ranks agree on."""

    @property
    def casts_alone(self) -> bool:
        """Whether `store_alone` works: no other rank, and no earlier step, has a say in the scales."""

    def store_alone(self, values: torch.Tensor) -> None:
        """Quantize values [n, columns] with scales of their own: amax, scales and codes in one cast."""

    def cast_own(self, values: torch.Tensor, ranks: int) -> OwnCast | None:
        """Return the cast of values [n, columns] with scales of their own; None, on all ranks, where ranks share one.

        Args:
            values: float16, bfloat16 or float32, on the device of the codes.
            ranks: How many ranks hold the weight, each an equal part of its rows, the last ones less or nothing.
        """

    def keys(self, values: torch.Tensor) -> torch.Tensor:
        """Return int32 keys [k] of the amax of values [n, columns]; MAX combines them over ranks."""

    def store(self, values: torch.Tensor, keys: torch.Tensor, *, step: bool) -> None:
        """Quantize values [n, columns] with scales from the agreed `keys`.

        Args:
            values: float16, bfloat16 or float32, on the device of the codes.
            keys: int32 [k], combined over ranks.
            step: Whether an optimizer step made the values.
        """

    def nbytes(self) -> dict[str, int]:
        """Return the bytes held here, by kind: "codes", "scales", "transposes"."""
