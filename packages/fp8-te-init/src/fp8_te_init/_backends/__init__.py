"""How the rest of the package sees FP8 weights of different make: one class per make, one protocol."""

from fp8_te_init._backends.te_rows import te_rows
from fp8_te_init._requantizable import Requantizable
from fp8_te_init._weight import primary_of

__all__ = ["Requantizable", "requantizable"]


def requantizable(parameter: object) -> Requantizable | None:
    """Return the FP8 rows that this rank holds of a parameter; None if it is not an FP8 weight."""
    primary = primary_of(parameter)
    return te_rows(parameter) if primary is None else primary.quantized_rows
