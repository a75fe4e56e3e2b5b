"""Adversarial inputs for casts and scales: values on which implementations differ.

Eight bits are few, so everything can be covered: every code, every midpoint between two codes and the float32
values next to it, and every special value of the source type.
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
        fmt: A format or its name, E8M0 included.
        finite: Leave out the codes of infinity and NaN.

    Returns:
        uint8 [256], or [n] of the finite ones.

    Raises:
        Fp8Error: If `fmt` is unknown.
    """
    codes = np.arange(256, dtype=np.uint8)
    return codes[np.isfinite(decode(codes, fmt))] if finite else codes


def all_bfloat16() -> NDArray[np.generic]:
    """Return every bfloat16, in the order of its bits, bfloat16 [65536]."""
    return np.arange(65536, dtype=np.uint16).view(ml_dtypes.bfloat16)


def all_float16() -> NDArray[np.float16]:
    """Return every float16, in the order of its bits, float16 [65536]."""
    return np.arange(65536, dtype=np.uint16).view(np.float16)


def midpoints(fmt: str | Format) -> NDArray[np.float32]:
    """Return midpoints of neighboring values, and float32 around them.

    The midpoint between the largest value and the next one that the format would have is included: there,
    casts that do not saturate overflow.

    Args:
        fmt: A data format or its name.

    Returns:
        float32 [3 * n], exact; negative ones included.

    Raises:
        Fp8Error: If `fmt` is E8M0 or unknown.
    """
    values = _positive_values(get_data_format(fmt))
    # Where the value after the largest would be, were the spacing to go on.
    beyond = 2 * values[-1] - values[-2]
    middle = ((values + np.append(values[1:], beyond)) / 2).astype(np.float32)
    return _both_signs(with_neighbours(middle, 1))


def special_values(dtype: DTypeLike = np.float32) -> NDArray[np.generic]:
    """Return special values of a float type, with both signs.

    Zeros, the smallest and largest subnormals, the smallest normal, one and its neighbours, the largest
    value, infinities, and quiet and signalling NaNs with several payloads.

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
    # Signalling with the smallest payload; quiet with none, one and the largest. Half of the smallest normal is the
    # upper mantissa bit, which marks a quiet NaN.
    nans = [inf + 1, inf + normal // 2, inf + normal // 2 + 1, inf + normal - 1]
    bits = np.array(positive + nans, f"u{dtype.itemsize}")
    return np.concatenate([bits, bits | np.array(1 << (width - 1), bits.dtype)]).view(dtype)


def adversarial(fmt: str | Format, dtype: DTypeLike = np.float32, scale: float = 1.0) -> NDArray[np.generic]:
    """Return the inputs on which casts to `fmt` with `scale` go wrong.

    They are, divided by `scale`: every value of the format and every midpoint, each with its neighbours in
    `dtype`; values around and far above the maximum; values around half the smallest subnormal; and
    `special_values(dtype)`.

    Args:
        fmt: A data format or its name.
        dtype: float16, bfloat16 or float32.
        scale: The multiplier into FP8 that the inputs are made for.

    Returns:
        [n], in `dtype`.

    Raises:
        Fp8Error: If the format is unknown, the dtype is not supported, or the scale is not positive and finite.
    """
    fmt, dtype = get_data_format(fmt), _checked(dtype)
    if not 0 < scale < np.inf:
        raise Fp8Error(f"scale must be positive and finite, got {scale!r}.")
    values = _positive_values(fmt)
    # The last sum is the largest value's and the one beyond it, 2 * v[-1] - v[-2].
    middle = np.append(values[1:] + values[:-1], 3 * values[-1] - values[-2]) / 2
    extreme = fmt.max * np.array([1.001, 1.5, 2, 4, 2.0**20])
    tiny = fmt.smallest_subnormal * np.array([0.25, 0.499, 0.501, 0.75])
    with np.errstate(all="ignore"):
        wanted = (np.concatenate([values, middle, extreme, tiny]) / scale).astype(dtype)
    return np.concatenate([_both_signs(with_neighbours(wanted, 2)), special_values(dtype)])


def adversarial_amax() -> NDArray[np.float32]:
    """Return amax values, float32 [n], on which scale rules differ.

    Zero, subnormals, infinity and NaN; the floors of other libraries; where the scale of each format meets its
    limits or a power of two; amax equal to each format's maximum; all with their neighbours, and powers of
    two throughout.
    """
    limits = [fmt.max / bound for fmt in DATA_FORMATS for bound in (SCALE_MAX, 2.0**127, SCALE_MIN)]
    floors = [1e-12, 1e-4]  # of torchao and of DeepGEMM
    corners = [1.0, 1.75, 1.875, 2.0**-126, *(fmt.max for fmt in DATA_FORMATS), *floors]
    powers = [fmt.max * 2.0**power for fmt in DATA_FORMATS for power in (-100, -33, -1, 1, 33, 100)]
    with np.errstate(all="ignore"):
        exact = np.array([*limits, *corners, *powers], np.float64).astype(np.float32)
    # 1.5 * 2^k in steps through the whole range, subnormals included.
    ladder = np.ldexp(np.float32(1.5), np.arange(-149, 127, 23)).astype(np.float32)
    special = special_values(np.float32)
    # Unique by bits: by value, NaN would be merged and subnormals could be.
    return np.unique(
        np.concatenate([with_neighbours(exact, 1), ladder, special[~np.signbit(special)]]).view(np.uint32)
    ).view(np.float32)


def with_neighbours(x: NDArray[Any], reach: int) -> NDArray[Any]:
    """Return non-negative floats with `reach` neighbors on either side."""
    bits = x.view(f"i{x.dtype.itemsize}").astype(np.int64)
    around = bits[:, None] + np.arange(-reach, reach + 1)
    return np.maximum(around, 0).astype(f"i{x.dtype.itemsize}").view(x.dtype).reshape(-1)


def _positive_values(fmt: Format) -> NDArray[np.float64]:
    """The finite non-negative values of a format in order."""
    return decode(np.arange(fmt.max_code + 1, dtype=np.uint8), fmt).astype(np.float64)


def _both_signs(x: NDArray[Any]) -> NDArray[Any]:
    return np.concatenate([x, -x])


def _checked(dtype: DTypeLike) -> np.dtype:
    target = np.dtype(dtype)
    if target not in INPUT_DTYPES:
        raise Fp8Error(f"dtype must be float16, bfloat16 or float32, got {target}.")
    return target
