"""Hypothesis strategies for FP8 properties: values drawn as bit patterns, each as likely as another."""

from typing import Any

import numpy as np
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import DTypeLike, NDArray

from fp8_common.formats import DATA_FORMATS, Format
from fp8_common.policy import CANONICAL, POWER_OF_2, SCALE_MAX, SCALE_MIN, ScalePolicy
from fp8_common.presets import PRESETS

_POLICIES = (CANONICAL, POWER_OF_2, *(preset() for preset in PRESETS.values()))


def formats() -> st.SearchStrategy[Format]:
    """Draw a data format."""
    return st.sampled_from(DATA_FORMATS)


def policies() -> st.SearchStrategy[ScalePolicy]:
    """Draw the canonical policy, its power-of-two variant or a preset."""
    return st.sampled_from(_POLICIES)


def shapes(max_dims: int = 3, max_side: int = 40) -> st.SearchStrategy[tuple[int, ...]]:
    """Draw array shapes, sides of length zero included."""
    return hnp.array_shapes(min_dims=1, max_dims=max_dims, min_side=0, max_side=max_side)


def arrays(
    dtype: DTypeLike = np.float32, shape: st.SearchStrategy[tuple[int, ...]] | tuple[int, ...] | None = None
) -> st.SearchStrategy[NDArray[Any]]:
    """Draw arrays of any bit patterns: NaN, infinities and subnormals as often as the bits hold them.

    Args:
        dtype: float16, bfloat16 or float32.
        shape: A shape, or a strategy for it; None draws `shapes()`.
    """
    found = np.dtype(dtype)
    bits = np.dtype(f"u{found.itemsize}")
    return hnp.arrays(bits, shapes() if shape is None else shape).map(lambda drawn: drawn.view(found))


def amaxes() -> st.SearchStrategy[np.float32]:
    """Draw a float32 amax: any non-negative bit pattern, infinity and NaN included."""
    return st.integers(0, 2**31 - 1).map(lambda bits: np.uint32(bits).view(np.float32))


def scales() -> st.SearchStrategy[np.float32]:
    """Draw a float32 scale from the canonical range [2^-126, 2^100]."""
    return st.floats(SCALE_MIN, SCALE_MAX, width=32).map(np.float32)
