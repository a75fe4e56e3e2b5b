"""The exceptions of the fp8 packages. A message says what is wrong, what was given and what to do."""


class Fp8Error(ValueError):
    """A value, name or combination that the fp8 packages cannot accept; the base of all their errors.

    It is a `ValueError`, so code that already handles bad values handles it too.
    """


class Fp8UnsupportedError(Fp8Error, RuntimeError):
    """The hardware or an installed version cannot do what was asked; the message names the way round it."""


class Fp8StaleError(Fp8Error, RuntimeError):
    """Cached FP8 codes or scales no longer belong to the weight they stand for."""
