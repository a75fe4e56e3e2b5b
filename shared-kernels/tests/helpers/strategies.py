"""Hypothesis strategies for FP8 properties: values drawn as bit patterns, each as likely as another."""

from typing import Any

import numpy as np
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import DTypeLike, NDArray

from fp8_common.formats import DATA_FORMATS, Format


def formats() -> st.SearchStrategy[Format]:
    """Draw a data format."""
    return st.sampled_from(DATA_FORMATS)


def arrays(dtype: DTypeLike = np.float32, shape: tuple[int, ...] = ()) -> st.SearchStrategy[NDArray[Any]]:
    """Draw arrays of any bit patterns: NaN, infinities and subnormals as often as the bits hold them.

    Args:
        dtype: float16, bfloat16 or float32.
        shape: Their shape.
    """
    found = np.dtype(dtype)
    return hnp.arrays(np.dtype(f"u{found.itemsize}"), shape).map(lambda drawn: drawn.view(found))
