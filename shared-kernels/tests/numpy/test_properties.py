"""Properties of the NumPy core on inputs drawn by hypothesis."""

import ml_dtypes
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8_common import (
    amax,
    amax_to_scale,
    decode,
    dequantize,
    dequantize_mx,
    encode,
    quantize,
    quantize_blockwise,
    quantize_mx,
    quantize_rowwise,
    reciprocal,
    update_history,
)
from fp8_common.testing import assert_same_bits
from tests.helpers import strategies

quick = settings(max_examples=60, deadline=None, derandomize=True)


@quick
@given(x=strategies.arrays(), fmt=strategies.formats())
def test_encoding_is_monotone_odd_and_idempotent(x, fmt):
    codes = encode(x, fmt)
    values = decode(codes, fmt)
    finite = np.isfinite(x)
    # an infinity becomes NaN, what overflows saturates
    assert np.array_equal(np.isnan(values), ~finite)
    assert (np.diff(values[finite][np.argsort(x[finite], axis=None)]) >= 0).all()
    assert_same_bits(decode(encode(-x, fmt), fmt) + 0, -values + 0, source=x)
    assert_same_bits(encode(values, fmt), codes, fmt=fmt, source=x)


@quick
@given(x=strategies.arrays(ml_dtypes.bfloat16, (7, 70)), seed=st.integers(0, 99))
def test_amax_does_not_depend_on_order(x, seed):
    shuffled = np.random.default_rng(seed).permutation(x.reshape(-1))
    assert_same_bits(amax(shuffled), amax(x))
    assert_same_bits(amax(amax(x, axis=1)), amax(x))


@quick
@given(a=strategies.amaxes(), b=strategies.amaxes(), fmt=strategies.formats(), policy=strategies.policies())
def test_a_larger_amax_never_gets_a_larger_scale(a, b, fmt, policy):
    low, high = sorted([a, b], key=lambda value: value.view(np.int32))
    if low == 0 or not np.isfinite(high):
        return
    found = amax_to_scale(np.stack([low, high]), fmt, policy)
    assert found[0] >= found[1] > 0


@quick
@given(x=strategies.arrays(shape=(3, 150)), fmt=strategies.formats())
def test_every_granularity_is_finite_for_finite_input(x, fmt):
    x = np.where(np.isfinite(x), x, np.float32(0))
    for data, scale in (quantize_rowwise(x, fmt), quantize_blockwise(x, fmt), quantize_blockwise(x, fmt, (2, 7))):
        assert np.isfinite(decode(data, fmt)).all()
        assert np.isfinite(scale).all()
        assert np.isfinite(reciprocal(scale)).all()
    assert np.isfinite(dequantize_mx(*quantize_mx(x, fmt), fmt)).all()


@quick
@given(x=strategies.arrays(shape=(40,)), scale=strategies.scales(), fmt=strategies.formats())
def test_going_back_stays_within_half_a_step_or_saturates(x, scale, fmt):
    with np.errstate(over="ignore", invalid="ignore"):
        scaled = (x * scale).astype(np.float64)
    found = decode(quantize(x, scale, fmt), fmt).astype(np.float64)
    usable = np.abs(scaled) <= fmt.max
    step = np.maximum(np.abs(scaled) * 2.0**-fmt.mantissa_bits, fmt.smallest_subnormal)
    assert (np.abs(found - scaled)[usable] <= step[usable] / 2).all()
    back = dequantize(quantize(x, scale, fmt), scale, fmt)
    assert np.isfinite(back[usable & (scale > 2.0**-100)]).all()


@quick
@given(observed=strategies.arrays(shape=(9, 2)), length=st.integers(1, 5))
def test_the_window_is_the_last_finite_observations(observed, length):
    window = np.zeros((length, 2), np.float32)
    for row in observed:
        window, used = update_history(window, row)
    for column in range(2):
        finite = np.abs(observed[np.isfinite(observed[:, column]), column])[-length:]
        assert used[column] == max(finite, default=0)
        assert sorted(window[:, column])[length - len(finite) :] == sorted(finite)
