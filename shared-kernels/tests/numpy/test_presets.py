"""The presets: every entry of the documented table; and how the scales of other libraries differ from ours.

The rules of torchao, flax, MS-AMP and DeepGEMM are written here in NumPy. Their libraries are compared with in
tests/conformance/test_peers.py, TransformerEngine's formulas in test_te_formulas.py.
"""

import numpy as np
import pytest

from fp8_common import CANONICAL, POWER_OF_2, ScalePolicy, amax_to_scale
from fp8_common.numerics import amax_to_scale_inv
from fp8_common.policy import FLOAT32_MAX
from fp8_common.presets import PRESETS, mx, te_current, te_delayed
from fp8_common.testing import adversarial_amax, assert_same_bits

PREV = np.float32(3.5)
MAX = {"e4m3": 448.0, "e5m2": 57344.0}
CORNERS = adversarial_amax()
DRAWN = np.random.default_rng(3).integers(1, 0x7F800000, 50_000, dtype=np.int32).view(np.float32)
AMAX = np.concatenate([CORNERS[(CORNERS > 0) & np.isfinite(CORNERS)], DRAWN])
"""Positive finite amax: corners and random bit patterns."""

# policy, its scale for amax 0, infinity, NaN and the smallest (2^-149)
CELLS = [
    (te_delayed(), 3.5, 3.5, 3.5, FLOAT32_MAX),
    (te_current(), 1.0, 1.0, 1.0, FLOAT32_MAX),
    (te_current(eps=0.5), 896.0, 1.0, 1.0, 896.0),
    (mx(), 2.0**127, np.nan, np.nan, 2.0**127),
]


@pytest.mark.parametrize(("policy", "zero", "inf", "nan", "tiny"), CELLS)
def test_cells(policy, zero, inf, nan, tiny):
    amax = np.float32([0.0, np.inf, np.nan, 2.0**-149])
    assert_same_bits(amax_to_scale(amax, "e4m3", policy, PREV), np.float32([zero, inf, nan, tiny]), name=policy.name)


def test_every_preset_has_a_row():
    assert {policy.name for policy, *_ in CELLS} == set(PRESETS)
    assert all(preset().name == name for name, preset in PRESETS.items())


def quotient(top, amax):
    """RN32(top / amax), overflowing to infinity, through float64."""
    with np.errstate(all="ignore"):
        return (np.float64(top) / np.asarray(amax, np.float64)).astype(np.float32)


def floor_power(x):
    """The largest power of two not above x; infinity stays."""
    return np.where(np.isinf(x), x, np.ldexp(1.0, np.frexp(x.astype(np.float64))[1] - 1)).astype(np.float32)


def ceil_power(x):
    mantissa, exponent = np.frexp(x.astype(np.float64))
    return np.ldexp(1.0, exponent - (mantissa == 0.5)).astype(np.float32)


def with_margin(x, margin):
    with np.errstate(over="ignore"):
        return (x.astype(np.float64) * 2.0**-margin).astype(np.float32)


def at_least(eps):
    return lambda amax: np.maximum(amax.astype(np.float64), eps)


# ours, the rule of a library, and the amax for which both give the same bits: elsewhere ours has limits
NORMAL = (2.0**-80, 2.0**120)
SAME = {
    "torchao": (te_current(eps=1e-12), lambda top, a: quotient(top, at_least(1e-12)(a)), (0, np.inf)),
    "torchao pow2": (
        te_current(pow2=True, eps=1e-12),
        lambda top, a: floor_power(quotient(top, at_least(1e-12)(a))),
        (0, np.inf),
    ),
    "flax": (te_delayed(), quotient, NORMAL),
    "flax margin 4": (te_delayed(margin=4), lambda top, a: with_margin(quotient(top, a), 4), NORMAL),
    "msamp": (POWER_OF_2, lambda top, a: floor_power(quotient(top, a)), NORMAL),
    "msamp margin -2": (
        ScalePolicy(power_of_2=True, margin=-2),
        lambda top, a: floor_power(with_margin(quotient(top, a), -2)),
        NORMAL,
    ),
}


@pytest.mark.parametrize("fmt", MAX)
@pytest.mark.parametrize("name", SAME)
def test_scales_of_libraries_equal_ours_between_the_limits(name, fmt):
    policy, formula, (low, high) = SAME[name]
    amax = AMAX[(low < AMAX) & (high > AMAX)]
    assert_same_bits(amax_to_scale(amax, fmt, policy, PREV), np.float32(formula(MAX[fmt], amax)), source=amax)


@pytest.mark.parametrize("fmt", MAX)
def test_deepgemm_stores_inverses_that_differ_from_ours_by_one_unit_in_the_last_place(fmt):
    """DeepGEMM computes max(amax, 1e-4) / max; ours is the reciprocal of max / amax, which rounds twice."""
    amax = AMAX[(AMAX > 1e-4) & (AMAX < 2.0**100)]
    theirs = quotient(amax, MAX[fmt]).view(np.int32)
    ours = amax_to_scale_inv(amax, fmt, CANONICAL).view(np.int32)
    assert 0.1 < (theirs != ours).mean() < 0.5
    assert abs(theirs - ours).max() == 1


@pytest.mark.parametrize("fmt", MAX)
def test_deepgemm_ue8m0_scales_equal_ours(fmt):
    """A power of two rounded up is the reciprocal of the power of two rounded down."""
    amax = AMAX[(AMAX > 1e-4) & (AMAX < 2.0**100)]
    theirs = ceil_power(quotient(amax, MAX[fmt]))
    ours = amax_to_scale_inv(amax, fmt, POWER_OF_2)
    # exactly a power of two away where the two quotients round to different sides of one
    differs = theirs != ours
    assert np.array_equal(np.maximum(theirs, ours)[differs], 2 * np.minimum(theirs, ours)[differs])
    assert differs.mean() < 1e-3


def test_delayed_presets_carry_their_history():
    assert (te_delayed().history, te_delayed().algo) == (1024, "max")
    assert te_delayed(history=16, algo="most_recent").history == 16
    assert te_current().history == 0
