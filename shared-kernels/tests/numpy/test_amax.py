"""amax: an integer maximum, independent of order, exact for subnormals, keeping NaN."""

import ml_dtypes
import numpy as np
import pytest

from fp8_common import Fp8Error, amax
from fp8_common.testing import all_bfloat16, all_float16, assert_same_bits


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


@pytest.mark.parametrize("inputs", [all_bfloat16, all_float16], ids=["bfloat16", "float16"])
def test_every_16_bit_float_is_its_own_amax(inputs):
    x = inputs()
    with np.errstate(invalid="ignore"):
        want = np.abs(x.astype(np.float32))
    assert_same_bits(amax(x[:, None], axis=1), want, source=x)


@pytest.mark.parametrize("shape", [(2, 3, 4), (2, 3, 0), (0, 3, 4)])
@pytest.mark.parametrize(("axis", "keep"), [(None, False), (0, False), (-1, True), ((0, 2), False), ([0, 1], True)])
def test_axes_and_empty_reductions_which_are_zero(shape, axis, keep):
    x = np.random.default_rng(1).normal(size=shape).astype(np.float32)
    axes = tuple(axis) if isinstance(axis, list) else axis
    assert_same_bits(amax(x, axis=axis, keepdims=keep), np.abs(x).max(axis=axes, keepdims=keep, initial=0))


@pytest.mark.parametrize("dtype", [np.float64, np.int32, np.uint8, ml_dtypes.float8_e4m3fn])
def test_other_dtypes_are_refused(dtype):
    with pytest.raises(Fp8Error, match=r"x must be float16, bfloat16 or float32, got .* Convert it to float32"):
        amax(np.ones(3, dtype))
