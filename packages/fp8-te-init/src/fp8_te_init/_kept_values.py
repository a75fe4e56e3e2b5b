"""`KeptValues`: the high-precision initial values that are kept of one FP8 parameter, for this rank's rows.

They are set when values are written to the weight, dropped by a release, and lost when somebody changes the codes
in another way. What is returned always quantizes to the present codes, bit for bit; anything else is an error.
"""

import logging
from collections.abc import Callable
from typing import Literal

import torch

from fp8_te_init._errors import StaleInitError
from fp8_te_init._init_replay import InitReplay
from fp8_te_init._rows import Rows
from fp8_te_init._sources import CopySource, Preserve, QuantizedRows, ReplaySource, ResidualSource, Source

Release = Literal["seed", "step", "forward", "manual"]
"""When kept values are dropped; see `primary_weights`."""

logger = logging.getLogger(__name__)


class KeptValues:
    """The high-precision start of the rows that this rank holds of one parameter.

    Args:
        preserve: How values are kept.

    Attributes:
        source: Where the values come from; None if nothing is kept.
        lost: Why there is nothing although something was kept; None if that is as it should be.
        dropped_by: What dropped the values that were kept; None if nothing did.
        sharded: Whether the parameter was a distributed one when it was last looked at.
    """

    def __init__(self, preserve: Preserve) -> None:
        self.preserve: Preserve = preserve
        self.source: Source | None = None
        self.lost: str | None = None
        self.dropped_by: str | None = None
        self.sharded = False
        # Closed for good by a release: later writes (of a fine-tuning, of averages) are no start of a training any
        # more.
        self._open = preserve != "none"

    @property
    def keeps_writes(self) -> bool:
        """Whether values that are written to the weight are to be kept: until the first release."""
        return self._open

    @property
    def wants_replay(self) -> bool:
        """Whether the operators that make the values are to be recorded."""
        return self._open and self.preserve == "replay"

    @property
    def replay(self) -> InitReplay | None:
        """The operators recorded so far."""
        return self.source.replay if isinstance(self.source, ReplaySource) else None

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
        # Sharded since: also where no finalizer has run yet.
        if self.source.rows != quantized.rows:
            self.narrow(quantized.rows)
        values = self.source.values(quantized)
        codes = quantized.codes()
        # Each read casts once more and compares, instead of trusting that every write was seen: kernels of other
        # libraries write to codes without any operator.
        if not torch.equal(quantized.quantized(values.to(codes.device)), codes):
            raise StaleInitError(
                "The kept high-precision values do not quantize to the present FP8 codes: the weight was changed "
                "after they were kept (a loaded checkpoint, an optimizer step, an in-place edit). Seed the masters "
                "before that, or from the checkpoint; clear_high_precision_init_val() gives up the old values."
            )
        return values

    def keep(self, values: torch.Tensor, quantized: QuantizedRows, replay: InitReplay | None = None) -> None:
        """Keep values [n, columns] that the present codes were made from."""
        self.lost = None
        self.source = self._source_for(values, quantized, replay)

    def _source_for(self, values: torch.Tensor, quantized: QuantizedRows, replay: InitReplay | None) -> Source:
        # None from a source means that it cannot be exact for these values; a copy always is.
        source: Source | None = None
        if self.preserve == "residual":
            source = ResidualSource.of(values, quantized)
        elif self.preserve == "replay" and replay is not None:
            source = ReplaySource(replay, quantized.full_shape[1], values.dtype, quantized.rows)
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
        cuts_columns = rows.columns != self.source.rows.columns
        if not rows.lies_in(self.source.rows) or (cuts_columns and not self.source.cuts_columns):
            self.lose(f"Rows {self.source.rows} were kept, and this rank holds {rows} now. Keep before sharding again.")
            return
        self.source = self.source.narrowed(rows)

    def lose(self, why: str) -> None:
        """Drop what was kept, because the weight is another one now; reading raises with this reason."""
        if self.source is not None:
            self.source, self.lost = None, why

    def forget(self, why: str) -> None:
        """Drop what is kept, because other values took its place that are known in FP8 alone."""
        if self.source is not None:
            self.source, self.dropped_by = None, why
        self.lost = None

    def release(self, why: str) -> None:
        """Drop what is kept and keep nothing from now on; may be called again.

        Args:
            why: What drops it, for those who look for it later.
        """
        if self.source is not None:
            self.dropped_by = why
        self.source, self.lost, self._open = None, None, False

    def copied(self) -> "KeptValues":
        """Return the same for a copy of the weight."""
        # `sharded` is left out: `register` finds it for the copied parameter.
        twin = KeptValues(self.preserve)
        twin.source = None if self.source is None else self.source.copied()
        twin.lost, twin.dropped_by, twin._open = self.lost, self.dropped_by, self._open
        return twin


def keeper(
    kept: KeptValues | None, quantized: QuantizedRows, replay: InitReplay | None = None
) -> Callable[[torch.Tensor], None] | None:
    """Return what keeps the values [n, columns] of a write to a weight; None if they are not to be kept.

    Args:
        kept: Where they are kept.
        quantized: The weight.
        replay: What made the values, if it is known.
    """
    if kept is None or not kept.keeps_writes:
        return None
    return lambda values: kept.keep(values, quantized, replay)


def _why_not(preserve: str, values: torch.Tensor) -> str:
    if preserve == "replay":
        return "it was not made by random or constant in-place operators alone"
    if values.ndim != 2:
        return "it is a stack of weights"
    if values.dtype != torch.bfloat16:
        return f"residuals are differences of bfloat16 values, and it is {values.dtype}"
    return "the scale is too coarse for one byte per value"
