"""The errors of this package; `fp8_common` has the others."""

from fp8_common import Fp8Error, Fp8StaleError


class StaleInitError(Fp8StaleError):
    """The preserved values no longer match the codes of the weight."""


class MissingInitError(Fp8Error):
    """No exact values are available, or no master can be set."""
