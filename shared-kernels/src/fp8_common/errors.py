"""Exceptions of the fp8 packages.

A message has the problem, the given value and the remedy.
"""


class Fp8Error(ValueError):
    """Invalid value, name or combination; base of all errors here.

    It is a `ValueError`, so code that already handles bad values handles it too.
    """


class Fp8UnsupportedError(Fp8Error, RuntimeError):
    """Unsupported by the hardware or an installed version.

    The message has a workaround.
    """


class Fp8StaleError(Fp8Error, RuntimeError):
    """Cached FP8 codes or scales no longer belong to their weight."""
