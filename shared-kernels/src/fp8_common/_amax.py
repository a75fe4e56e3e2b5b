"""The absolute maximum (amax) of an array, as an integer maximum over float bits with the sign cleared.

For non-negative floats the order of the bits is the order of the values, infinity sorts above every number and NaN
above infinity. So the integer maximum needs no rounding, does not depend on the order of reduction, survives
hardware that flushes subnormals, and cannot lose a NaN.
"""

from collections.abc import Sequence

import ml_dtypes
import numpy as np
from numpy.typing import ArrayLike, NDArray

from fp8_common._errors import Fp8Error

KEY_MASK = 0x7FFFFFFF
"""Clears the sign of float32 bits."""
INF_KEY = 0x7F800000
"""Key of infinity; larger keys are NaN."""
MIN_NORMAL_KEY = 0x00800000
"""Key of 2^-126, the smallest normal float32; smaller keys are subnormal or zero."""

INPUT_DTYPES = tuple(np.dtype(t) for t in (np.float16, ml_dtypes.bfloat16, np.float32))
"""The dtypes that can be quantized; all convert to float32 exactly."""


def as_float32(x: ArrayLike, what: str = "x") -> NDArray[np.float32]:
    """Return `x` as float32, exactly.

    Raises:
        Fp8Error: `x` is not float16, bfloat16 or float32.
    """
    array = np.asarray(x)
    if array.dtype not in INPUT_DTYPES:
        raise Fp8Error(f"{what} must be float16, bfloat16 or float32, got {array.dtype}. Convert it to float32 first.")
    with np.errstate(invalid="ignore"):  # a signalling NaN is no error
        # Widening only: no input dtype has a value that float32 lacks, so nothing is rounded here.
        return array.astype(np.float32)


def amax(x: ArrayLike, axis: int | Sequence[int] | None = None, keepdims: bool = False) -> NDArray[np.float32]:
    """Return max |x| over `axis` as float32, exactly.

    Args:
        x: Array of float16, bfloat16 or float32.
        axis: Axis or axes to reduce; None reduces all.
        keepdims: Keep reduced axes with length 1.

    Returns:
        float32; 0 for an empty reduction, NaN if any reduced element is NaN, else inf if any is infinite.

    Raises:
        Fp8Error: `x` has another dtype.
    """
    axes = tuple(axis) if isinstance(axis, Sequence) else axis
    # np.max of floats keeps a NaN too; keys are what the GPU kernels and the all-reduces compare.
    keys = float_key(as_float32(x))
    # Keys are never negative, so `initial` changes nothing but the result of an empty reduction.
    return key_to_float(np.max(keys, axis=axes, keepdims=keepdims, initial=0))


def float_key(x: NDArray[np.float32]) -> NDArray[np.int32]:
    """Return the float32 bits with the sign cleared, as int32: an order-preserving key of |x|."""
    return x.view(np.int32) & np.int32(KEY_MASK)


def key_to_float(key: NDArray[np.int32]) -> NDArray[np.float32]:
    """Return the float32 whose bits are `key`."""
    return np.asarray(key, np.int32).view(np.float32)
