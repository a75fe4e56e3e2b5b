"""The presets: every entry of the documented table, and formulas derived independently (test_te_formulas.py: TE's)."""

import numpy as np
import pytest

from fp8_common import PRESETS, amax_to_scale, amax_to_scale_inv
from fp8_common.policy import FLOAT32_MAX
from fp8_common.presets import deepgemm, flax, msamp, mx, te_current, te_delayed, torchao
from fp8_common.testing import adversarial_amax, assert_same_bits

PREV = np.float32(3.5)
MAX = {"e4m3": 448.0, "e5m2": 57344.0}
INTO, BACK = amax_to_scale, amax_to_scale_inv
CORNERS = adversarial_amax()
DRAWN = np.random.default_rng(3).integers(1, 0x7F800000, 50_000, dtype=np.int32).view(np.float32)
AMAX = np.concatenate([CORNERS[(CORNERS > 0) & np.isfinite(CORNERS)], DRAWN])
"""Positive finite amax: corners and random bit patterns."""

# preset, way, for amax 0, infinity, NaN and the smallest (2^-149); for flax and DeepGEMM what they store: the way back
CELLS = [
    (torchao(), INTO, np.float32(4.48e14), 0.0, np.nan, np.float32(4.48e14)),
    (te_delayed(), INTO, 3.5, 3.5, 3.5, FLOAT32_MAX),
    (te_current(), INTO, 1.0, 1.0, 1.0, FLOAT32_MAX),
    (te_current(eps=0.5), INTO, 896.0, 1.0, 1.0, 896.0),
    (flax(), BACK, 1 / 3.5, 1 / 3.5, 1 / 3.5, 0.0),
    (flax(), INTO, 3.5, 3.5, 3.5, np.inf),
    (msamp(), INTO, 3.5, 3.5, 3.5, np.inf),
    (deepgemm(), BACK, 1e-4 / 448, np.inf, np.nan, 1e-4 / 448),
    (deepgemm(ue8m0=True), BACK, 2.0**-22, np.inf, np.nan, 2.0**-22),
    (mx(), INTO, 2.0**127, np.nan, np.nan, 2.0**127),
]


@pytest.mark.parametrize(("policy", "way", "zero", "inf", "nan", "tiny"), CELLS)
def test_cells(policy, way, zero, inf, nan, tiny):
    amax = np.float32([0.0, np.inf, np.nan, 2.0**-149])
    assert_same_bits(way(amax, "e4m3", policy, PREV), np.float32([zero, inf, nan, tiny]), name=policy.name)


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


def descale(top, amax):
    """DeepGEMM divides the other way round."""
    return quotient(np.maximum(amax, np.float32(1e-4)), top)


FORMULAS = {
    "torchao": (torchao(), INTO, lambda top, a: quotient(top, np.maximum(a.astype(np.float64), 1e-12))),
    "torchao pow2": (
        torchao(power_of_2=True),
        INTO,
        lambda top, a: floor_power(quotient(top, np.maximum(a.astype(np.float64), 1e-12))),
    ),
    "flax": (flax(), INTO, quotient),
    "flax stores the reciprocal": (flax(), BACK, lambda top, a: quotient(1, quotient(top, a))),
    # the margin comes after the rounding and the overflow of the quotient
    "flax margin 4": (flax(margin=4), INTO, lambda top, a: np.maximum(with_margin(quotient(top, a), 4), 2.0**-126)),
    "msamp": (msamp(), INTO, lambda top, a: floor_power(quotient(top, a))),
    "msamp margin -2": (msamp(margin=-2), INTO, lambda top, a: floor_power(with_margin(quotient(top, a), -2))),
    "deepgemm": (deepgemm(), BACK, descale),
    "deepgemm into": (deepgemm(), INTO, lambda top, a: quotient(1, descale(top, a))),
    "deepgemm ue8m0": (deepgemm(ue8m0=True), BACK, lambda top, a: ceil_power(descale(top, a))),
    "deepgemm ue8m0 into": (deepgemm(ue8m0=True), INTO, lambda top, a: quotient(1, ceil_power(descale(top, a)))),
}


@pytest.mark.parametrize("fmt", MAX)
@pytest.mark.parametrize("name", FORMULAS)
def test_formulas(name, fmt):
    policy, way, formula = FORMULAS[name]
    assert_same_bits(way(AMAX, fmt, policy, PREV), np.float32(formula(MAX[fmt], AMAX)), source=AMAX)


def test_delayed_presets_carry_their_history():
    assert (te_delayed().history, te_delayed().algo) == (1024, "max")
    assert (te_delayed(history=16, algo="most_recent").history, flax(history=8).history) == (16, 8)
    assert te_current().history == torchao().history == 0
