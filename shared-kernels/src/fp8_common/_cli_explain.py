"""The report of `fp8 explain`: one number cast to FP8 and back, its neighbours and its rounding errors."""

import math
from typing import Any

import numpy as np

from fp8_common._cli_text import number, table
from fp8_common._errors import Fp8Error
from fp8_common._formats import Format, get_data_format
from fp8_common._quantize import dequantize, quantize
from fp8_common._rounding import decode
from fp8_common._scaling import reciprocal


def parse_number(text: str) -> float:
    """Return the number that a user wrote: decimal, hexadecimal (0x1.8p-3), inf or nan.

    Raises:
        Fp8Error: The text is no number.
    """
    try:
        # float.fromhex reads "10" as sixteen, so it is asked only where the prefix says hexadecimal.
        return float.fromhex(text) if "0x" in text.lower() else float(text)
    except (ValueError, OverflowError) as error:
        raise Fp8Error(f"{text.strip()!r} is not a number. Write it like 0.3, 1e-4, 0x1.8p-3, inf or nan.") from error


def facts(value: float, fmt: str | Format, scale: float = 1.0) -> dict[str, Any]:
    """Return everything about casting `value * scale` to `fmt`.

    Args:
        value: The number; it is rounded to float32 first.
        fmt: A data format or its name.
        scale: The multiplier into FP8; rounded to float32, it must be positive and finite.

    Raises:
        Fp8Error: The format is unknown, or the scale is not a positive finite float32.
    """
    fmt = get_data_format(fmt)
    with np.errstate(all="ignore"):  # overflow to infinity is part of the answer
        value32, scale32 = np.float32(value), np.float32(scale)
        scaled = value32 * scale32
    if not (math.isfinite(scale32) and scale32 > 0):
        raise Fp8Error(f"The scale must be positive and finite in float32, got {scale!r}.")
    code = quantize(value32, scale32, fmt)
    result = float(decode(code, fmt))
    back = float(dequantize(code, scale32, fmt))
    below, above = _neighbours(result, fmt)
    return {
        "format": fmt.name,
        "value": float(value32),
        "value_bits": f"0x{int(value32.view(np.uint32)):08x}",
        "exact_in_float32": value == float(value32) or math.isnan(value),
        "scale": float(scale32),
        "scaled": float(scaled),
        "code": int(code),
        "bits": _bits(int(code), fmt),
        "result": result,
        "below": below,
        "above": above,
        "rounding_error": result - float(scaled),
        "relative_error": (result - float(scaled)) / float(scaled) if scaled else 0.0,
        "tie": _is_tie(float(scaled), result, below, above),
        # By the product before rounding; a product that overflows float32 saturates like any other large number.
        "saturated": bool(abs(scaled) > fmt.max and math.isfinite(value32)),
        "underflowed": bool(scaled != 0 and result == 0),
        "scale_inv": float(reciprocal(scale32)),
        "back": back,
        "back_error": back - float(value32),
    }


def text(entry: dict[str, Any]) -> str:
    """Return `facts` for people."""
    rounded = "" if entry["exact_in_float32"] else ", rounded to float32"
    rows = [
        ("value", f"{number(entry['value'])} ({entry['value_bits']}){rounded}"),
        ("times scale", f"{number(entry['scaled'])} (scale {number(entry['scale'])})"),
        (
            f"in {entry['format']}",
            f"{number(entry['result'])} (0x{entry['code']:02x} = {entry['bits']}){_remark(entry)}",
        ),
        ("neighbours", _neighbour_text(entry)),
        ("rounding error", f"{number(entry['rounding_error'])}{_percent(entry['relative_error'])}"),
        ("back", f"{number(entry['back'])} (times 1/scale = {number(entry['scale_inv'])})"),
        ("error at the end", number(entry["back_error"])),
    ]
    return "\n".join(table(rows))


def _remark(entry: dict[str, Any]) -> str:
    """Name the special case of the rounding, if it is one; the first that applies."""
    if math.isnan(entry["result"]):
        return ", NaN stays NaN" if math.isnan(entry["value"]) else ", infinity becomes NaN: a product shall show it"
    if entry["saturated"]:
        return ", saturated: the magnitude is above the largest finite value"
    if entry["underflowed"]:
        return ", underflowed to zero"
    if entry["tie"]:
        return ", a tie: rounded to the even code"
    return ", exact" if entry["rounding_error"] == 0 else ""


def _neighbour_text(entry: dict[str, Any]) -> str:
    if math.isnan(entry["result"]):
        return "none"
    below = "none below" if entry["below"] is None else number(entry["below"])
    above = "none above" if entry["above"] is None else number(entry["above"])
    return f"{below}, {above}"


def _percent(relative: float) -> str:
    return f" ({100 * relative:+.3g} %)" if relative and math.isfinite(relative) else ""


def _neighbours(result: float, fmt: Format) -> tuple[float | None, float | None]:
    """The finite values next below and above `result`; None at the ends, and around NaN."""
    values = decode(np.arange(256, dtype=np.uint8), fmt).astype(np.float64)
    finite = values[np.isfinite(values)]
    below, above = finite[finite < result], finite[finite > result]
    return (float(below.max()) if below.size else None, float(above.min()) if above.size else None)


def _is_tie(scaled: float, result: float, below: float | None, above: float | None) -> bool:
    # Midpoints of FP8 values are exact in float64, so equality is the right comparison.
    middles = [(result + other) / 2 for other in (below, above) if other is not None]
    return scaled in middles


def _bits(code: int, fmt: Format) -> str:
    """The sign, exponent and mantissa fields in binary."""
    digits = f"{code:08b}"
    return f"{digits[0]} {digits[1 : 1 + fmt.exponent_bits]} {digits[1 + fmt.exponent_bits :]}"
