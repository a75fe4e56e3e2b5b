"""Exceptions of the fp8 packages.

A message gives the problem, the given value and the remedy.
"""


class Fp8Error(ValueError):
    """Invalid value, name or combination; base class of all errors.

    It is a `ValueError`, so code that handles bad values handles it, too.
    """


class Fp8UnsupportedError(Fp8Error, RuntimeError):
    """Operation that the hardware or an installed version does not support.

    The message gives a workaround.
    """


class Fp8StaleError(Fp8Error, RuntimeError):
    """FP8 codes or scales that no longer match their weight."""
