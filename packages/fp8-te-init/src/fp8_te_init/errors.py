"""The errors of this package alone; the others are those of `fp8_common`."""

from fp8_common import Fp8Error, Fp8StaleError


class StaleInitError(Fp8StaleError):
    """The values before rounding do not quantize to the codes of the FP8 weight: it was changed behind its back."""


class MissingInitError(Fp8Error):
    """Masters were asked for, and there are no exact values, or no master to set."""
