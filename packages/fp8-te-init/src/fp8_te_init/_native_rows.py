"""`NativeRows`: reads and writes a primary weight of this package."""

import torch

from fp8_common import Format
from fp8_te_init._own_cast import OwnCast, cast_own
from fp8_te_init._rows import Rows
from fp8_te_init._state import PrimaryState


class NativeRows:
    """The rows of a `PrimaryFloat8Weight` that this rank holds; a `backends.Requantizable`.

    Args:
        state: What is known about its storage.
        dtype: The dtype that it stands for.
    """

    def __init__(self, state: PrimaryState, dtype: torch.dtype) -> None:
        self._state, self._dtype = state, dtype

    @property
    def rows(self) -> Rows:
        """Which rows of the whole weight."""
        return self._state.place

    @property
    def full_shape(self) -> torch.Size:
        """[rows, columns] of the whole weight."""
        return self._state.whole_shape

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that the weight stands for."""
        return self._dtype

    @property
    def fmt(self) -> Format:
        """The format of the codes."""
        return self._state.cast.fp8_format

    def codes(self) -> torch.Tensor:
        """Return uint8 [n, columns], to read."""
        return self._state.own_codes

    def values(self) -> torch.Tensor:
        """Return float32 [n, columns], dequantized."""
        return self._state.own_values()

    def scale_inv(self) -> torch.Tensor:
        """Return float32 scales back from FP8 that broadcast to [n, columns]."""
        return self._state.own_scale_inv()

    def quantized(self, values: torch.Tensor) -> torch.Tensor:
        """Return uint8 codes of high-precision values [n, columns] with the present scales."""
        return self._state.quantized(values)

    @property
    def device(self) -> torch.device:
        """Where the codes are."""
        return self._state.codes.device

    def pending(self) -> torch.Tensor | None:
        """Return values [n, columns] that were written and wait for a scale that the ranks agree on."""
        return self._state.held

    @property
    def casts_alone(self) -> bool:
        """Whether no other rank, and no earlier step, has a say in the scales."""
        return self._state.casts_alone

    def store_alone(self, values: torch.Tensor) -> None:
        """Quantize values [n, columns] with scales of their own; see `PrimaryState.store_alone`."""
        self._state.store_alone(values)

    def cast_own(self, values: torch.Tensor, ranks: int) -> OwnCast | None:
        """Return the cast of values [n, columns] with scales of their own; see `_own_cast.cast_own`."""
        return cast_own(self._state, values, ranks)

    def keys(self, values: torch.Tensor) -> torch.Tensor:
        """Return int32 keys [k] of the amax of values [n, columns]."""
        return self._state.keys(values)

    def store(self, values: torch.Tensor, keys: torch.Tensor, *, step: bool) -> None:
        """Quantize values [n, columns] with scales from the agreed `keys`; see `PrimaryState.store`."""
        self._state.store(values, keys, step=step)

    def nbytes(self) -> dict[str, int]:
        """Return the bytes held here, by kind."""
        state = self._state
        history = 0 if state.history is None else state.history.nbytes
        return {"codes": state.codes.nbytes, "scales": state.scale.nbytes + history}
