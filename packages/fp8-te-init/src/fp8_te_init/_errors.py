"""The errors of this package alone; the others are those of `fp8_common`."""

from fp8_common import Fp8Error, Fp8StaleError


class StaleInitError(Fp8StaleError):
    """The kept high-precision values no longer belong to the FP8 weight: it was changed after they were kept."""


class MissingInitError(Fp8Error):
    """Masters were asked for, and no exact source of high-precision values is left for some weight."""
