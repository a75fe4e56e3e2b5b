"""`Format`: fields, limits and special codes of 8-bit formats.

No other module repeats these numbers. Sources: OCP 8-bit Floating Point Specification (E4M3, E5M2), OCP Microscaling
Specification (E8M0), and "8-bit Numerical Formats for Deep Neural Networks", arXiv:2206.02915 (FNUZ formats).
"""

import dataclasses
from functools import cached_property

import ml_dtypes
import numpy as np

from fp8_common.errors import Fp8Error


@dataclasses.dataclass(frozen=True, kw_only=True)
class Format:
    """An 8-bit floating point format.

    Attributes:
        name: Short name, e.g. "e4m3".
        dtype_name: Name of the dtype in ml_dtypes, torch and jax.numpy, e.g. "float8_e4m3fn".
        exponent_bits: Width of the exponent field.
        mantissa_bits: Width of the stored mantissa field.
        bias: Exponent bias.
        max_code: Code of the largest finite positive value.
        nan_code: Code that `encode` writes for NaN. Signed formats other than FNUZ ones add the sign bit.
        signed: Whether bit 7 is a sign; E8M0 is unsigned.
        fnuz: Whether the format has no infinity, a single NaN (0x80) and no negative zero.
        has_infinity: Whether the format has codes for infinity (E5M2 only).
        max: Largest finite value.
        min_exponent: Exponent of the smallest normal value, shared by subnormals. E8M0 has no subnormals: its lowest
            code is a normal value with this exponent.
    """

    name: str
    dtype_name: str
    exponent_bits: int
    mantissa_bits: int
    bias: int
    max_code: int
    nan_code: int
    signed: bool = True
    fnuz: bool = False
    has_infinity: bool = False

    max: float = dataclasses.field(init=False, repr=False, compare=False)
    min_exponent: int = dataclasses.field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Compute the limits."""
        # ml_dtypes is independent of this package's `decode`. The limits are fields, because compilers that trace casts
        # support neither NumPy nor a cached property.
        object.__setattr__(self, "max", float(np.uint8(self.max_code).view(self.numpy_dtype)))
        object.__setattr__(self, "min_exponent", int(self.signed) - self.bias)

    @cached_property
    def numpy_dtype(self) -> np.dtype:
        """ml_dtypes dtype of this format."""
        return np.dtype(getattr(ml_dtypes, self.dtype_name))

    @property
    def max_exponent(self) -> int:
        """floor(log2(max)), 8 for E4M3 and 15 for E5M2.

        The MX specification calls this exponent emax.
        """
        return (self.max_code >> self.mantissa_bits) - self.bias

    @property
    def smallest_normal(self) -> float:
        """Smallest positive normal value."""
        return 2.0**self.min_exponent

    @property
    def smallest_subnormal(self) -> float:
        """Smallest positive value: a subnormal one, except for E8M0."""
        return 2.0 ** (self.min_exponent - self.mantissa_bits)

    def __str__(self) -> str:
        """Return the short name."""
        return self.name


E4M3 = Format(
    name="e4m3", dtype_name="float8_e4m3fn", exponent_bits=4, mantissa_bits=3, bias=7, max_code=0x7E, nan_code=0x7F
)
E5M2 = Format(
    name="e5m2",
    dtype_name="float8_e5m2",
    exponent_bits=5,
    mantissa_bits=2,
    bias=15,
    max_code=0x7B,
    nan_code=0x7F,
    has_infinity=True,
)
E4M3FNUZ = Format(
    name="e4m3fnuz",
    dtype_name="float8_e4m3fnuz",
    exponent_bits=4,
    mantissa_bits=3,
    bias=8,
    max_code=0x7F,
    nan_code=0x80,
    fnuz=True,
)
E5M2FNUZ = Format(
    name="e5m2fnuz",
    dtype_name="float8_e5m2fnuz",
    exponent_bits=5,
    mantissa_bits=2,
    bias=16,
    max_code=0x7F,
    nan_code=0x80,
    fnuz=True,
)
E8M0 = Format(
    name="e8m0",
    dtype_name="float8_e8m0fnu",
    exponent_bits=8,
    mantissa_bits=0,
    bias=127,
    max_code=0xFE,
    nan_code=0xFF,
    signed=False,
)

FORMATS: dict[str, Format] = {f.name: f for f in (E4M3, E5M2, E4M3FNUZ, E5M2FNUZ, E8M0)}
"""All formats by short name."""

DATA_FORMATS: tuple[Format, ...] = (E4M3, E5M2, E4M3FNUZ, E5M2FNUZ)
"""Formats for data; E8M0 is for block scales only."""


def get_format(fmt: str | Format) -> Format:
    """Return the `Format` for a name.

    Args:
        fmt: Short name ("e4m3"), dtype name ("float8_e4m3fn"), or a `Format`, which is returned unchanged.

    Raises:
        Fp8Error: If the name is unknown.
    """
    if isinstance(fmt, Format):
        return fmt
    for candidate in FORMATS.values():
        if fmt in (candidate.name, candidate.dtype_name):
            return candidate
    raise Fp8Error(f"Unknown FP8 format {fmt!r}. Use one of {', '.join(FORMATS)}.")


def get_data_format(fmt: str | Format) -> Format:
    """Return the `Format` for a name, for formats of data.

    Raises:
        Fp8Error: If the name is unknown, or is the name of E8M0.
    """
    form = get_format(fmt)
    if form == E8M0:
        raise Fp8Error(
            "E8M0 holds block scales, not data. Quantize data to one of "
            f"{', '.join(f.name for f in DATA_FORMATS)}; make E8M0 scales with amax_to_e8m0."
        )
    return form
