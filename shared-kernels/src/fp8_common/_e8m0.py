"""E8M0 block scales of MX, computed by integer operations on the bits of the float32 amax alone.

Source: OCP Microscaling Formats (MX) Specification 1.0 for "floor"; the other modes are those of torchao and of
NVIDIA's cuBLAS recipe ("rceil").
"""

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fp8_common._amax import INF_KEY, as_float32, float_key
from fp8_common._errors import Fp8Error
from fp8_common._formats import E8M0, Format, get_data_format
from fp8_common._policy import MX_MODES, MxMode
from fp8_common._rounding import decode

MANTISSA = 0x007FFFFF
"""Mantissa field of float32 bits."""


def amax_to_e8m0(amax: ArrayLike, fmt: str | Format, mode: MxMode = "rceil") -> NDArray[np.uint8]:
    """Return the biased exponent of the block scale that goes back from FP8.

    Args:
        amax: float32, any shape: max |x| of each block.
        fmt: The element format of the block.
        mode: "floor": exponent of amax, minus the format's own (values may saturate). "ceil": the same, rounded up.
            "even": amax first rounded to the format's mantissa. "rceil": the smallest power of two that is at least
            amax / fmt.max, so that nothing saturates.

    Returns:
        uint8 codes of the shape of `amax`; 255 (NaN) where amax is infinite or NaN.

    Raises:
        Fp8Error: Unknown mode or format, or `amax` is not float16, bfloat16 or float32.
    """
    fmt = get_data_format(fmt)
    check_mode(mode)
    # 64 bits: "even" adds to the key, which may be that of a NaN already.
    key = float_key(as_float32(amax, "amax")).astype(np.int64)
    # float32 and E8M0 share the bias 127, so an exponent field of float32 is a code.
    code = _rceil(key, fmt) if mode == "rceil" else _round_exponent(key, fmt, mode) - fmt.max_exponent
    # Small amax, zero included, take code 0: the specification has no scale below 2^-127, and no zero.
    return np.where(key >= INF_KEY, E8M0.nan_code, np.maximum(code, 0)).astype(np.uint8)


def check_mode(mode: str) -> None:
    """Refuse unknown rounding modes.

    Raises:
        Fp8Error: `mode` is none of `MX_MODES`.
    """
    if mode not in MX_MODES:
        raise Fp8Error(f"mode must be one of {', '.join(MX_MODES)}, got {mode!r}.")


def e8m0_to_scale(codes: ArrayLike) -> NDArray[np.float32]:
    """Return the float32 multiplier into FP8, 2^(127-code); NaN for 255."""
    with np.errstate(all="ignore"):
        # Exact: 1/2^k is a power of two, and 2^-127 (code 254) is a float32 subnormal.
        return np.float32(1) / decode(codes, E8M0)


def e8m0_to_scale_inv(codes: ArrayLike) -> NDArray[np.float32]:
    """Return the float32 multiplier back from FP8, 2^(code-127); NaN for 255. Code 0 is subnormal."""
    return decode(codes, E8M0)


def _round_exponent(key: NDArray[np.int64], fmt: Format, mode: MxMode) -> NDArray[np.int64]:
    if mode == "even":
        # Half a step of the format's mantissa: where it carries, amax would round up to the next power of two.
        key = key + (1 << (22 - fmt.mantissa_bits))
    # Any mantissa bit puts amax above its power of two, which is what "ceil" rounds up.
    return (key >> 23) + ((key & MANTISSA) != 0 if mode == "ceil" else 0)


def _rceil(key: NDArray[np.int64], fmt: Format) -> NDArray[np.int64]:
    """Compare mantissas instead of dividing: amax <= fmt.max * 2^k exactly when its mantissa is not the larger."""
    # A division would round, and give a power of two for a quotient just above it.
    limit = int(np.float32(fmt.max).view(np.int32))
    exponent = (key >> 23) - ((limit >> 23) - 127)
    # amax / max is above 2^(difference of the exponents) exactly if amax's mantissa is above max's.
    # A subnormal amax has no leading bit to compare, and needs less than the smallest scale anyway.
    return np.where(key >> 23 == 0, 0, exponent + ((key & MANTISSA) > (limit & MANTISSA)))
