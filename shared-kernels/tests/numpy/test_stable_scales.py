"""Idempotent scale rules: what comes back from FP8 is cast with the same codes and the same scale once more."""

import re

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fp8_common as f8
import strategies
from fp8_common.policy import MAX_STABLE_MARGIN, MX_MODES
from fp8_common.presets import mx, te_current, te_delayed
from tests.helpers.repository import ROOT

quick = settings(max_examples=80, deadline=None, derandomize=True)


def stable(margin=0):
    return f8.ScalePolicy(name="stable", power_of_2=True, margin=margin, stable=True)


def moves(x, fmt, policy):
    """Whether another cast of the rows, or blocks of 32, of x changes a code or a scale."""
    found = []
    for _ in range(2):
        if policy.formula == "e8m0":
            found.append(f8.quantize_mx(x, fmt, policy.mx_mode))
            x = f8.dequantize_mx(*found[-1], fmt, x.dtype)
        else:
            found.append(f8.quantize_rowwise(x, fmt, -1, policy))
            x = f8.dequantize(*found[-1], fmt, x.dtype)
    return any(a.tobytes() != b.tobytes() for a, b in zip(*found, strict=True))


def ordinary(dtype, low=2.0**-100, high=2.0**126):
    """Values whose FP8 steps a bfloat16 holds, and which no rounding takes out of float32; zeros."""
    zero = dtype.type(0)  # the number 0 beside bfloat16 crashes NumPy 2.0
    return strategies.arrays(dtype, (12,)).map(lambda x: np.where((abs(x) > low) & (abs(x) < high), x, zero))


@pytest.mark.parametrize("dtype", [np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16)], ids=str)
@quick
@given(data=st.data(), fmt=strategies.formats(), margin=st.integers(0, MAX_STABLE_MARGIN))
def test_stable_scales_are_idempotent(dtype, data, fmt, margin):
    assert not moves(data.draw(ordinary(dtype)), fmt, stable(margin))
    assert not moves(data.draw(ordinary(dtype)), fmt, mx("stable"))
    # one magnitude, so that the largest one is often near a threshold
    assert not moves(data.draw(ordinary(dtype, 2.0**3, 2.0**5)), fmt, stable(margin))
    # amax that round to zero, and scales at their upper limit
    assert not moves(data.draw(ordinary(dtype, 2.0**-120, 2.0**-95)), fmt, stable(margin))


# the rules of the page's table: its first column, and the rules that its last one speaks of
ROWS = {
    "canonical": {"": f8.CANONICAL, "`power_of_2`": f8.POWER_OF_2, "`stable`": stable()},
    "te_delayed": {"": te_delayed()},
    "te_current": {"": te_current(), "`pow2`": te_current(pow2=True)},
    "mx": {f"`{mode}`": mx(mode) for mode in MX_MODES},
}
# all bfloat16 from 1 to 64, and amax of a few binades
EVERY = np.arange(0x3F80, 0x4280, dtype=np.uint16).view(ml_dtypes.bfloat16)[:, None]
DRAWN = np.exp2(np.random.default_rng(0).uniform(0, 6, (20_000, 1))).astype(np.float32)


@pytest.mark.parametrize("name", ROWS)
def test_the_pages_column_idempotent(name):
    page = (ROOT / "docs/numerics/definition.md").read_text()
    (row,) = re.findall(rf"^\| `?{name}\b.*\|$", page, re.M)
    said = row.strip("| ").split(" | ")[-1]
    kept = {
        option: not any(moves(x, fmt, policy) for x in (EVERY, DRAWN) for fmt in ("e4m3", "e5m2"))
        for option, policy in ROWS[name].items()
    }
    found = [option for option, same in kept.items() if same]
    assert said == ("no" if not found else "yes" if all(kept.values()) else ", ".join(found))
