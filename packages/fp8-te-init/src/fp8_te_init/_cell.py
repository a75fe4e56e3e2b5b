"""Decides what is kept of one parameter's high-precision start on this rank, and when it counts as gone.

A cell is filled when values are written to the weight, emptied by a release, and lost when somebody changes the codes
behind its back. What it returns always quantizes to the present codes, bit for bit; anything else is an error.
"""

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from fp8_te_init._errors import StaleInitError
from fp8_te_init._sources import CopySource, Preserve, QuantizedRows, ReplaySource, ResidualSource, Rows, Source
from fp8_te_init._tape import Tape

if TYPE_CHECKING:
    from fp8_te_init._release import ReleaseGroup

logger = logging.getLogger(__name__)


class InitCell:
    """The high-precision start of the rows that this rank holds of one parameter.

    Args:
        preserve: How values are kept.
        group: What is released together with it.

    Attributes:
        source: Where the values come from; None if nothing is kept.
        lost: Why there is nothing although something was kept; None if that is as it should be.
        sharded: Whether the parameter was a distributed one when it was last looked at.
    """

    def __init__(self, preserve: Preserve, group: "ReleaseGroup | None" = None) -> None:
        self.preserve: Preserve = preserve
        self.group = group
        self.source: Source | None = None
        self.lost: str | None = None
        self.sharded = False
        self._open = preserve != "none"
        if group is not None:
            group.add(self)

    @property
    def keeps_writes(self) -> bool:
        """Whether values that are written to the weight are to be kept: until the first release."""
        return self._open

    @property
    def wants_tape(self) -> bool:
        """Whether the operators that make the values are to be recorded."""
        return self._open and self.preserve == "replay"

    @property
    def tape(self) -> Tape | None:
        """The operators recorded so far."""
        return self.source.tape if isinstance(self.source, ReplaySource) else None

    @property
    def nbytes(self) -> int:
        """Bytes kept."""
        return 0 if self.source is None else self.source.nbytes

    def values(self, quantized: QuantizedRows) -> torch.Tensor | None:
        """Return the high-precision values [n, columns], or None if none are kept.

        Args:
            quantized: The weight as it is now.

        Raises:
            StaleInitError: Values were kept, and the weight was changed since.
        """
        if self.source is None:
            if self.lost is not None:
                raise StaleInitError(self.lost)
            return None
        if self.source.rows != quantized.rows:
            self.narrow(quantized.rows)
        values = self.source.values(quantized)
        codes = quantized.codes()
        if not torch.equal(quantized.quantized(values.to(codes.device)), codes):
            raise StaleInitError(
                "The kept high-precision values do not quantize to the present FP8 codes: the weight was changed "
                "after they were kept (a loaded checkpoint, an optimizer step, an in-place edit). Seed the masters "
                "before that, or from the checkpoint; clear_high_precision_init_val() gives up the old values."
            )
        return values

    def keep(self, values: torch.Tensor, quantized: QuantizedRows, tape: Tape | None = None) -> None:
        """Keep values [n, columns] that the present codes were made from."""
        self.lost = None
        self.source = self._source_for(values, quantized, tape)

    def _source_for(self, values: torch.Tensor, quantized: QuantizedRows, tape: Tape | None) -> Source:
        source: Source | None = None
        if self.preserve == "residual":
            source = ResidualSource.of(values, quantized)
        elif self.preserve == "replay" and tape is not None:
            source = ReplaySource(tape, quantized.full_shape[1], values.dtype, quantized.rows)
        if source is None:
            if self.preserve in ("residual", "replay"):
                logger.warning(
                    'preserve=%r cannot keep this weight exactly (%s); a copy ("cpu") is kept instead.',
                    self.preserve,
                    _why_not(self.preserve, values),
                )
            source = CopySource.of(values, quantized.rows, pinned=self.preserve == "pinned")
        return source

    def use(self, source: Source) -> None:
        """Take values from a source that was made elsewhere (Philox, a checkpoint)."""
        self.source, self.lost = source, None

    def narrow(self, rows: Rows) -> None:
        """Give up everything but some rows: the weight was sharded."""
        if self.source is None or self.source.rows == rows:
            return
        if not self.source.rows.start <= rows.start <= rows.stop <= self.source.rows.stop:
            self.lose(f"Rows {self.source.rows} were kept, and this rank holds {rows} now. Keep before sharding again.")
            return
        self.source = self.source.narrowed(rows)

    def lose(self, why: str) -> None:
        """Note that what was kept is worth nothing any more."""
        if self.source is not None:
            self.source, self.lost = None, why

    def release(self) -> None:
        """Drop what is kept and keep nothing from now on; may be called again."""
        self.source, self.lost, self._open = None, None, False

    def copied(self) -> "InitCell":
        """Return a cell for a copy of the weight, with the same content and released together with this one."""
        twin = InitCell(self.preserve, self.group)
        twin.source = None if self.source is None else self.source.copied()
        twin.lost, twin._open = self.lost, self._open
        return twin


def keeper(
    cell: InitCell | None, quantized: QuantizedRows, tape: Tape | None = None
) -> Callable[[torch.Tensor], None] | None:
    """Return what keeps the values [n, columns] of a write to a weight; None if they are not to be kept.

    Args:
        cell: Where they are kept.
        quantized: The weight.
        tape: What made the values, if it is known.
    """
    if cell is None or not cell.keeps_writes:
        return None
    return lambda values: cell.keep(values, quantized, tape)


def _why_not(preserve: str, values: torch.Tensor) -> str:
    if preserve == "replay":
        return "it was not made by random or constant in-place operators alone"
    if values.dtype != torch.bfloat16:
        return f"residuals are differences of bfloat16 values, and it is {values.dtype}"
    return "the scale is too coarse for one byte per value"
