"""How the rest of the package sees FP8 weights of different make: one class per make, one protocol."""

from fp8_te_init.native_rows import NativeRows
from fp8_te_init.sources.base import QuantizedRows
from fp8_te_init.weight import primary_of

__all__ = ["NativeRows", "quantized_rows"]


def quantized_rows(parameter: object) -> QuantizedRows | None:
    """Return the FP8 rows that this rank holds of a parameter; None if it is not an FP8 weight."""
    primary = primary_of(parameter)
    return None if primary is None else primary.quantized_rows
