"""Idempotent scale rules: what comes back from FP8 is cast with the same codes and the same scale once more."""

import re

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8_common import (
    CANONICAL,
    POWER_OF_2,
    ScalePolicy,
    amax,
    amax_to_scale,
    dequantize,
    dequantize_mx,
    quantize,
    quantize_mx,
    quantize_rowwise,
)
from fp8_common.policy import MAX_STABLE_MARGIN, MX_MODES
from fp8_common.presets import deepgemm, flax, msamp, mx, te_current, te_delayed, torchao
from tests.helpers import strategies
from tests.helpers.repository import ROOT

DTYPES = (np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16))
quick = settings(max_examples=150, deadline=None, derandomize=True)


def stable(margin=0):
    return ScalePolicy(name="stable", power_of_2=True, margin=margin, stable=True)


def there_and_back(x, fmt, policy):
    """Codes, scale and the values that come back in the dtype of `x`."""
    if policy.formula == "e8m0":
        codes, scale = quantize_mx(x, fmt, policy.mx_mode)
        return codes, scale, dequantize_mx(codes, scale, fmt, x.dtype)
    scale = amax_to_scale(amax(x), fmt, policy)
    codes = quantize(x, scale, fmt)
    return codes, scale, dequantize(codes, scale, fmt, x.dtype)


def moves(x, fmt, policy):
    """Whether another cast changes a code or a scale."""
    first = there_and_back(x, fmt, policy)
    again = there_and_back(first[2], fmt, policy)
    return any(a.tobytes() != b.tobytes() for a, b in zip(first[:2], again[:2], strict=True))


def ordinary(dtype, low=2.0**-100, high=2.0**126):
    """Values whose FP8 steps a bfloat16 holds, and which no rounding takes out of float32; zeros."""
    zero = dtype.type(0)  # the number 0 beside bfloat16 crashes NumPy 2.0
    return strategies.arrays(dtype, (12,)).map(lambda x: np.where((abs(x) > low) & (abs(x) < high), x, zero))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@quick
@given(data=st.data(), fmt=strategies.formats(), margin=st.integers(0, MAX_STABLE_MARGIN))
def test_stable_scales_are_idempotent(dtype, data, fmt, margin):
    assert not moves(data.draw(ordinary(dtype)), fmt, stable(margin))
    assert not moves(data.draw(ordinary(dtype)), fmt, mx("stable"))
    # one magnitude, so that the largest one is often near a threshold
    assert not moves(data.draw(ordinary(dtype, 2.0**3, 2.0**5)), fmt, stable(margin))
    # amax that round to zero, and scales at their upper limit
    assert not moves(data.draw(ordinary(dtype, 2.0**-120, 2.0**-95)), fmt, stable(margin))


@quick
@given(a=strategies.amaxes(), fmt=strategies.formats())
def test_a_stable_scale_is_the_rule_on_the_rounded_amax(a, fmt):
    """The definition in words: the scale is taken from the amax of the rounded values once more."""
    if not 2.0**-90 < a < 2.0**126:
        return
    back = dequantize(quantize(a, amax_to_scale(a, fmt, POWER_OF_2), fmt), amax_to_scale(a, fmt, POWER_OF_2), fmt)
    assert amax_to_scale(a, fmt, stable()) == amax_to_scale(back, fmt, POWER_OF_2)


# the rules of the page's table: its first column, and the rules that its last one speaks of
ROWS = {
    "canonical": {"": CANONICAL, "`power_of_2`": POWER_OF_2, "`stable`": stable()},
    "te_delayed": {"": te_delayed()},
    "te_current": {"": te_current(), "`pow2`": te_current(pow2=True)},
    "torchao": {"": torchao(), "`power_of_2`": torchao(power_of_2=True)},
    "flax": {"": flax()},
    "msamp": {"": msamp()},
    "deepgemm": {"": deepgemm(), "`ue8m0`": deepgemm(ue8m0=True)},
    "mx": {f"`{mode}`": mx(mode) for mode in MX_MODES},
}


MAGNITUDES = np.arange(0x3F80, 0x4280, dtype=np.uint16)
"""The bits of all bfloat16 from 1 to 64."""


def idempotent(policy):
    """Whether every amax of a few binades comes back with its scale and its code."""
    drawn = np.exp2(np.random.default_rng(0).uniform(0, 6, 20_000)).astype(np.float32)
    for x in (MAGNITUDES.view(ml_dtypes.bfloat16), drawn):
        for fmt in ("e4m3", "e5m2"):
            first = quantize_rowwise(x[:, None], fmt, -1, policy)
            again = quantize_rowwise(dequantize(*first, fmt, x.dtype), fmt, -1, policy)
            if any((a != b).any() for a, b in zip(first, again, strict=True)):
                return False
    return True


@pytest.mark.parametrize("name", ROWS)
def test_the_pages_column_idempotent_is_what_is_found(name):
    page = (ROOT / "docs/numerics/definition.md").read_text()
    (row,) = re.findall(rf"^\| `?{name}\b.*\|$", page, re.M)
    said = row.strip("| ").split(" | ")[-1]
    found = [option for option, policy in ROWS[name].items() if idempotent(policy)]
    want = "no" if not found else "yes" if len(found) == len(ROWS[name]) else ", ".join(found)
    assert said == want
