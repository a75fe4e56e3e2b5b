"""The presets: every entry of the documented table, and formulas derived independently (test_te_formulas.py: TE's)."""

import numpy as np
import pytest

from fp8_common import PRESETS, amax_to_scale, amax_to_scale_inv
from fp8_common.policy import FLOAT32_MAX
from fp8_common.presets import deepgemm, flax, msamp, mx, te_current, te_delayed, torchao
from fp8_common.testing import adversarial_amax, assert_same_bits

PREV = np.float32(3.5)
MAX = {"e4m3": 448.0, "e5m2": 57344.0}
NORMAL = np.float32(1.3)


def value(policy, amax, fmt="e4m3", back=False):
    compute = amax_to_scale_inv if back else amax_to_scale
    return float(compute(np.float32(amax), fmt, policy, PREV))


# peer, policy, amax 0, inf, NaN, tiny amax (2^-149); for flax and DeepGEMM what they store: the way back
CELLS = [
    ("torchao", torchao(), False, float(np.float32(4.48e14)), 0.0, np.nan, float(np.float32(4.48e14))),
    ("te_delayed", te_delayed(), False, 3.5, 3.5, 3.5, FLOAT32_MAX),
    ("te_current", te_current(), False, 1.0, 1.0, 1.0, FLOAT32_MAX),
    ("te_current_eps", te_current(eps=0.5), False, 896.0, 1.0, 1.0, 896.0),
    ("flax", flax(), True, 1 / 3.5, 1 / 3.5, 1 / 3.5, 0.0),
    ("msamp", msamp(), False, 3.5, 3.5, 3.5, np.inf),
    ("deepgemm", deepgemm(), True, 1e-4 / 448, np.inf, np.nan, 1e-4 / 448),
    ("deepgemm_ue8m0", deepgemm(ue8m0=True), True, 2.0**-22, np.inf, np.nan, 2.0**-22),
    ("mx", mx(), False, 2.0**127, np.nan, np.nan, 2.0**127),
]


@pytest.mark.parametrize(("name", "policy", "back", "zero", "inf", "nan", "tiny"), CELLS, ids=[c[0] for c in CELLS])
def test_cells(name, policy, back, zero, inf, nan, tiny):
    for amax, want in ((0.0, zero), (np.inf, inf), (np.nan, nan), (2.0**-149, tiny)):
        assert_same_bits(np.float32(value(policy, amax, back=back)), np.float32(want), name=f"{name} {amax}")


def test_every_preset_has_a_row():
    assert {name.replace("_eps", "").replace("_ue8m0", "") for name, *_ in CELLS} == set(PRESETS)
    assert all(preset().name == name for name, preset in PRESETS.items())


def ordinary():
    """Positive finite amax: corners and random bit patterns."""
    corners = adversarial_amax()
    drawn = np.random.default_rng(3).integers(1, 0x7F800000, 50_000, dtype=np.int32).view(np.float32)
    return np.concatenate([corners[(corners > 0) & np.isfinite(corners)], drawn])


def quotient(top, amax):
    """RN32(top / amax), overflowing to infinity, through float64."""
    with np.errstate(over="ignore"):
        return (np.float64(top) / amax.astype(np.float64)).astype(np.float32)


def floor_power(x):
    """The largest power of two not above x; infinity stays."""
    with np.errstate(over="ignore"):
        return np.where(np.isinf(x), x, np.ldexp(1.0, np.frexp(x.astype(np.float64))[1] - 1)).astype(np.float32)


def with_margin(x, margin):
    with np.errstate(over="ignore"):
        return (x.astype(np.float64) * 2.0**-margin).astype(np.float32)


FORMULAS = {
    "torchao": (torchao(), lambda top, a: (top / np.maximum(a.astype(np.float64), 1e-12)).astype(np.float32)),
    "torchao pow2": (
        torchao(power_of_2=True),
        lambda top, a: floor_power((top / np.maximum(a.astype(np.float64), 1e-12)).astype(np.float32)),
    ),
    "flax": (flax(), lambda top, a: quotient(top, a)),
    # the margin comes after the rounding and the overflow of the quotient
    "flax margin 4": (flax(margin=4), lambda top, a: np.maximum(with_margin(quotient(top, a), 4), 2.0**-126)),
    "msamp": (msamp(), lambda top, a: floor_power(quotient(top, a))),
    "msamp margin -2": (msamp(margin=-2), lambda top, a: floor_power(with_margin(quotient(top, a), -2))),
}


@pytest.mark.parametrize("fmt", MAX)
@pytest.mark.parametrize("name", FORMULAS)
def test_formulas(name, fmt):
    policy, formula = FORMULAS[name]
    amax = ordinary()
    want = np.asarray(formula(MAX[fmt], amax), np.float32)
    assert_same_bits(amax_to_scale(amax, fmt, policy, PREV), want, source=amax)


@pytest.mark.parametrize("fmt", MAX)
@pytest.mark.parametrize("ue8m0", [False, True])
def test_deepgemm_divides_the_other_way_round(fmt, ue8m0):
    amax = ordinary()
    descale = np.maximum(amax, np.float32(1e-4)).astype(np.float64) / MAX[fmt]
    want = descale.astype(np.float32)
    if ue8m0:
        mantissa, exponent = np.frexp(want.astype(np.float64))
        want = np.ldexp(1.0, exponent - (mantissa == 0.5)).astype(np.float32)
    policy = deepgemm(ue8m0=ue8m0)
    assert_same_bits(amax_to_scale_inv(amax, fmt, policy), want, source=amax)
    into = (1.0 / want.astype(np.float64)).astype(np.float32)
    assert_same_bits(amax_to_scale(amax, fmt, policy), into, source=amax)


def test_flax_stores_the_reciprocal_and_restores_the_scale_from_it():
    amax = ordinary()
    scale = amax_to_scale(amax, "e4m3", flax())
    with np.errstate(divide="ignore", over="ignore"):
        want = (1.0 / scale.astype(np.float64)).astype(np.float32)
    assert_same_bits(amax_to_scale_inv(amax, "e4m3", flax()), want, source=amax)
    assert value(flax(), 0.0) == 3.5


def test_peers_differ_from_the_canonical_rule_only_outside_their_limits():
    amax = ordinary()
    usual = (amax > 1e-4) & (amax < 1e30)
    want = amax_to_scale(amax[usual], "e4m3")
    for policy in (te_delayed(), te_current(), torchao(), flax()):
        assert_same_bits(amax_to_scale(amax[usual], "e4m3", policy), want, source=amax[usual], name=policy.name)


def test_delayed_presets_carry_their_history():
    assert (te_delayed().history, te_delayed().algo) == (1024, "max")
    assert (te_delayed(history=16, algo="most_recent").history, flax(history=8).history) == (16, 8)
    assert te_current().history == torchao().history == 0
