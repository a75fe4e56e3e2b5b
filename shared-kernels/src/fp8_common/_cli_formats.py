"""The table of `fp8 formats`: fields, limits and special codes of every format."""

from typing import Any

import numpy as np

from fp8_common._cli_text import number, table
from fp8_common._formats import FORMATS, Format
from fp8_common._rounding import decode

HEADER = (
    "name",
    "dtype",
    "s e m",
    "bias",
    "max",
    "min normal",
    "min subnormal",
    "infinity",
    "-0",
    "NaN codes",
)


def facts() -> list[dict[str, Any]]:
    """Return one dictionary per format."""
    return [_facts(fmt) for fmt in FORMATS.values()]


def text() -> str:
    """Return the table for people."""
    return "\n".join(table([HEADER, *(_row(entry) for entry in facts())]))


def _facts(fmt: Format) -> dict[str, Any]:
    values = decode(np.arange(256, dtype=np.uint8), fmt)
    return {
        "name": fmt.name,
        "dtype": fmt.dtype_name,
        "sign_bits": int(fmt.signed),
        "exponent_bits": fmt.exponent_bits,
        "mantissa_bits": fmt.mantissa_bits,
        "bias": fmt.bias,
        "max": fmt.max,
        "smallest_normal": fmt.smallest_normal,
        "smallest_subnormal": fmt.smallest_subnormal if fmt.mantissa_bits else None,
        "has_infinity": fmt.has_infinity,
        "has_negative_zero": fmt.signed and not fmt.fnuz,
        # NaN alone is not equal to itself.
        "nan_codes": [code for code in range(256) if values[code] != values[code]],
    }


def _row(entry: dict[str, Any]) -> tuple[str, ...]:
    subnormal = entry["smallest_subnormal"]
    codes = [f"0x{code:02x}" for code in entry["nan_codes"]]
    return (
        entry["name"],
        entry["dtype"],
        f"{entry['sign_bits']} {entry['exponent_bits']} {entry['mantissa_bits']}",
        str(entry["bias"]),
        number(entry["max"]),
        number(entry["smallest_normal"]),
        "none" if subnormal is None else number(subnormal),
        "yes" if entry["has_infinity"] else "no",
        "yes" if entry["has_negative_zero"] else "no",
        " ".join(codes) if len(codes) <= 2 else f"{codes[0]}-{codes[len(codes) // 2 - 1]} and with sign",
    )
