"""amax: an integer maximum, independent of order, exact for subnormals, keeping NaN."""

import numpy as np
import pytest

from fp8_common import amax
from fp8_common.testing import assert_same_bits


@pytest.mark.parametrize(
    ("x", "want"),
    [
        ([], 0.0),
        ([-0.0], 0.0),
        ([1.0, -3.0, 2.0], 3.0),
        ([1e-40, -2e-40], 2e-40),
        ([2.0**-149], 2.0**-149),
        ([3e38, -np.inf], np.inf),
        *(([*[1.0] * place, np.nan, np.inf, 2.0], np.nan) for place in (0, 3, 7)),
        ([-np.nan], np.nan),
    ],
)
def test_values_and_their_sign_is_cleared(x, want):
    found = amax(np.array(x, np.float32))
    assert_same_bits(found, np.float32(want))
    assert not np.signbit(found)


@pytest.mark.parametrize("shape", [(2, 3, 4), (2, 3, 0), (0, 3, 4)])
@pytest.mark.parametrize(("axis", "keep"), [(None, False), (0, False), (-1, True), ((0, 2), False), ([0, 1], True)])
def test_axes_and_empty_reductions_which_are_zero(shape, axis, keep):
    x = np.random.default_rng(1).normal(size=shape).astype(np.float32)
    axes = tuple(axis) if isinstance(axis, list) else axis
    assert_same_bits(amax(x, axis=axis, keepdims=keep), np.abs(x).max(axis=axes, keepdims=keep, initial=0))
