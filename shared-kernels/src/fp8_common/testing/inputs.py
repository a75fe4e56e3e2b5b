"""Adversarial inputs for casts and scales: values on which implementations differ.

With eight bits, complete coverage is possible: all codes, all midpoints between two codes with the float32 values next
to them, and all special values of the source type.
"""

from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import DTypeLike, NDArray

from fp8_common._reference.rounding import decode
from fp8_common._reference.scaling import INPUT_DTYPES
from fp8_common.errors import Fp8Error
from fp8_common.formats import DATA_FORMATS, Format, get_data_format
from fp8_common.policy import SCALE_MAX, SCALE_MIN

_EXPONENT_BITS = {np.dtype(np.float16): 5, np.dtype(ml_dtypes.bfloat16): 8, np.dtype(np.float32): 8}


def all_codes(fmt: str | Format, *, finite: bool = False) -> NDArray[np.uint8]:
    """Return the codes of a format in order, uint8.

    Args:
        fmt: Format or its name, including E8M0.
        finite: Whether to omit the codes of infinity and NaN.

    Returns:
        uint8 [256], or fewer with `finite`.

    Raises:
        Fp8Error: If `fmt` is unknown.
    """
    codes = np.arange(256, dtype=np.uint8)
    return codes[np.isfinite(decode(codes, fmt))] if finite else codes


def all_bfloat16() -> NDArray[np.generic]:
    """Return all bfloat16 values in the order of their bits, bfloat16 [65536]."""
    return np.arange(65536, dtype=np.uint16).view(ml_dtypes.bfloat16)


def all_float16() -> NDArray[np.float16]:
    """Return all float16 values in the order of their bits, float16 [65536]."""
    return np.arange(65536, dtype=np.uint16).view(np.float16)


def midpoints(fmt: str | Format) -> NDArray[np.float32]:
    """Return the midpoints of neighboring values, and the float32 next to them.

    The midpoint between the largest value and the value that would follow it is included. There, casts that do not
    saturate overflow.

    Args:
        fmt: Data format or its name.

    Returns:
        float32 [3 * n], exact, of both signs.

    Raises:
        Fp8Error: If `fmt` is E8M0 or unknown.
    """
    values = _positive_values(get_data_format(fmt))
    # The value that would follow the largest one, at the same distance.
    beyond = 2 * values[-1] - values[-2]
    middle = ((values + np.append(values[1:], beyond)) / 2).astype(np.float32)
    return _both_signs(with_neighbours(middle, 1))


def special_values(dtype: DTypeLike = np.float32) -> NDArray[np.generic]:
    """Return special values of a float type, with both signs.

    They are zeros, the smallest and largest subnormals, the smallest normal value and 1 with their neighbors, the
    largest value, infinities, and quiet and signaling NaNs with several payloads.

    Args:
        dtype: float16, bfloat16 or float32.

    Returns:
        [32], in `dtype`.

    Raises:
        Fp8Error: If the dtype is not supported.
    """
    dtype = _checked(dtype)
    width = 8 * dtype.itemsize
    mantissa = width - 1 - _EXPONENT_BITS[dtype]
    inf = (2 ** _EXPONENT_BITS[dtype] - 1) << mantissa
    bias_bits = (2 ** (_EXPONENT_BITS[dtype] - 1) - 1) << mantissa
    normal = 1 << mantissa
    positive = [
        0,
        1,
        2,
        normal // 2,
        normal - 1,
        normal,
        normal + 1,
        bias_bits - 1,
        bias_bits,
        bias_bits + 1,
        inf - 1,
        inf,
    ]
    # A signaling NaN with the smallest payload, and quiet NaNs with payload 0, 1 and the largest. The bits of half the
    # smallest normal are the upper mantissa bit, which marks a quiet NaN.
    nans = [inf + 1, inf + normal // 2, inf + normal // 2 + 1, inf + normal - 1]
    bits = np.array(positive + nans, f"u{dtype.itemsize}")
    return np.concatenate([bits, bits | np.array(1 << (width - 1), bits.dtype)]).view(dtype)


def adversarial(fmt: str | Format, dtype: DTypeLike = np.float32, scale: float = 1.0) -> NDArray[np.generic]:
    """Return inputs on which casts to a format often go wrong.

    They are all values of the format and all midpoints, values around and far above the maximum, and values around half
    the smallest subnormal, divided by `scale`, with their neighbors in `dtype`; and `special_values(dtype)`.

    Args:
        fmt: Data format or its name.
        dtype: float16, bfloat16 or float32.
        scale: Scale into FP8 of the cast to test.

    Returns:
        [n], in `dtype`.

    Raises:
        Fp8Error: If the format is unknown, the dtype is not supported, or the scale is not positive and finite.
    """
    fmt, dtype = get_data_format(fmt), _checked(dtype)
    if not 0 < scale < np.inf:
        raise Fp8Error(f"scale must be positive and finite, got {scale!r}.")
    values = _positive_values(fmt)
    # The last sum is that of the largest value and the one that would follow it, 2 * v[-1] - v[-2].
    middle = np.append(values[1:] + values[:-1], 3 * values[-1] - values[-2]) / 2
    extreme = fmt.max * np.array([1.001, 1.5, 2, 4, 2.0**20])
    tiny = fmt.smallest_subnormal * np.array([0.25, 0.499, 0.501, 0.75])
    with np.errstate(all="ignore"):
        wanted = (np.concatenate([values, middle, extreme, tiny]) / scale).astype(dtype)
    return np.concatenate([_both_signs(with_neighbours(wanted, 2)), special_values(dtype)])


def adversarial_amax() -> NDArray[np.float32]:
    """Return amax values, float32 [n], on which scale rules differ.

    They are zero, subnormals, infinity and NaN; lower bounds of other libraries; values at which the scale for a format
    reaches a limit or a power of two; the maximum of each format; all these with their neighbors; and values over the
    whole range.
    """
    limits = [fmt.max / bound for fmt in DATA_FORMATS for bound in (SCALE_MAX, 2.0**127, SCALE_MIN)]
    floors = [1e-12, 1e-4]  # of torchao and of DeepGEMM
    corners = [1.0, 1.75, 1.875, 2.0**-126, *(fmt.max for fmt in DATA_FORMATS), *floors]
    powers = [fmt.max * 2.0**power for fmt in DATA_FORMATS for power in (-100, -33, -1, 1, 33, 100)]
    with np.errstate(all="ignore"):
        exact = np.array([*limits, *corners, *powers], np.float64).astype(np.float32)
    # 1.5 * 2^k in steps over the whole range, including subnormals.
    ladder = np.ldexp(np.float32(1.5), np.arange(-149, 127, 23)).astype(np.float32)
    special = special_values(np.float32)
    # Unique by bits, because comparisons of values merge NaN and may merge subnormals.
    return np.unique(
        np.concatenate([with_neighbours(exact, 1), ladder, special[~np.signbit(special)]]).view(np.uint32)
    ).view(np.float32)


def with_neighbours(x: NDArray[Any], reach: int) -> NDArray[Any]:
    """Return non-negative floats with `reach` neighbors on each side."""
    bits = x.view(f"i{x.dtype.itemsize}").astype(np.int64)
    around = bits[:, None] + np.arange(-reach, reach + 1)
    return np.maximum(around, 0).astype(f"i{x.dtype.itemsize}").view(x.dtype).reshape(-1)


def _positive_values(fmt: Format) -> NDArray[np.float64]:
    """Return the finite non-negative values of a format in order."""
    return decode(np.arange(fmt.max_code + 1, dtype=np.uint8), fmt).astype(np.float64)


def _both_signs(x: NDArray[Any]) -> NDArray[Any]:
    return np.concatenate([x, -x])


def _checked(dtype: DTypeLike) -> np.dtype:
    target = np.dtype(dtype)
    if target not in INPUT_DTYPES:
        raise Fp8Error(f"dtype must be float16, bfloat16 or float32, got {target}.")
    return target
