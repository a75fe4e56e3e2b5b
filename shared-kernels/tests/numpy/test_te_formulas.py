"""The presets named after TransformerEngine equal its published formulas bit for bit, but for known cases.

The formulas are written here on NumPy alone. Sources, all of TransformerEngine 2.20.2: `_default_sf_compute` and
`_update_amax_history` (pytorch/quantization.py) for delayed scaling; the reference of current scaling
(pytorch/custom_recipes); `cvt_f32_to_fp8e8m0fnu` (common/CuTeDSL) for MX. An infinite amax gives scale 1 in current
scaling, as in its CUDA code.
"""

import itertools

import numpy as np
import pytest

import fp8_common as f8
from conformance_inputs import any_bits, count
from fp8_common.presets import te_current, te_delayed
from fp8_common.testing import adversarial_amax, assert_same_bits

PREVIOUS, FLT_MAX = np.float32(3.5), np.finfo(np.float32).max
SMALLEST_MX = np.float32(2.0**-110)
"""Below it the quotient of amax and the largest value is subnormal, and is rounded twice by TransformerEngine."""
formats = pytest.mark.parametrize("fmt", [f8.E4M3, f8.E5M2], ids=str)


def delayed_scale(amax, previous, fmt, margin=0):
    """Divide by amax, then by 2^margin; the previous scale stays for zero, infinity and NaN."""
    with np.errstate(all="ignore"):
        scale = (np.float32(fmt.max) / amax) / np.float32(2.0**margin)
    scale = np.where((amax > 0) & np.isfinite(amax), scale, previous)
    return np.where(np.isinf(scale), FLT_MAX, scale).astype(np.float32)


def delayed_step(history, amax, previous, fmt, algo="max"):
    """Write slot 0, reduce, and make room: roll by -1, clear slot 0. Returns (history, scale)."""
    history = history.copy()
    history[0] = amax
    used = history.max(axis=0) if algo == "max" else history[0].copy()
    rolled = np.roll(history, -1, axis=0)
    rolled[0] = 0
    return rolled, delayed_scale(used, previous, fmt)


def current_scale(amax, fmt, power_of_2, epsilon):
    """Raise amax to epsilon and divide; 1 for zero, infinity and NaN."""
    usable = np.isfinite(amax) & (np.maximum(amax, np.float32(epsilon)) > 0)
    with np.errstate(all="ignore"):
        scale = np.float32(fmt.max) / np.maximum(amax, np.float32(epsilon))
    scale = np.where(np.isinf(scale), FLT_MAX, scale)
    if power_of_2:
        scale = np.ldexp(np.float32(1), np.frexp(np.where(usable, scale, 1))[1] - 1)
    return np.where(usable, scale, 1).astype(np.float32)


def e8m0(amax, fmt):
    """Multiply amax by the rounded reciprocal of the largest value, round the exponent up; infinity gives 254."""
    bits = (amax * (np.float32(1) / np.float32(fmt.max))).view(np.uint32)
    exponent, mantissa = bits >> 23, bits & 0x7FFFFF
    up = (mantissa > 0) & ~((exponent == 0) & (mantissa <= 0x400000))
    return np.where(np.isnan(amax), 255, np.where(np.isinf(amax), 254, exponent + up)).astype(np.uint8)


def amaxes(full):
    """Every kind of amax, and any bits; those for which a margin neither overflows nor leaves the normal numbers."""
    amax = np.concatenate([np.abs(adversarial_amax()), np.abs(any_bits(np.float32, count(full)))])
    return amax, amax[(amax > 2.0**-60) & (amax < 2.0**60)]


@formats
def test_scales(fmt, full):
    amax, usual = amaxes(full)
    for margin in (0, -2, 1, 3, 16):
        given = usual if margin else amax
        ours = f8.amax_to_scale(given, fmt, te_delayed(margin=margin), PREVIOUS)
        assert_same_bits(ours, delayed_scale(given, PREVIOUS, fmt, margin), name=f"margin {margin}")
    for power_of_2, epsilon in itertools.product((False, True), (0.0, 1e-6, 0.5)):
        rule, theirs = te_current(pow2=power_of_2, eps=epsilon), current_scale(amax, fmt, power_of_2, epsilon)
        assert_same_bits(f8.amax_to_scale(amax, fmt, rule), theirs, name=f"current {power_of_2} {epsilon}")
        assert_same_bits(f8.numerics.amax_to_scale_inv(amax, fmt, rule), np.float32(1) / theirs)
    amax = amax[np.isfinite(amax) & ((amax == 0) | (amax >= SMALLEST_MX))]
    assert_same_bits(f8.numerics.amax_to_e8m0(amax, fmt, "rceil"), e8m0(amax, fmt), source=amax)


@formats
@pytest.mark.parametrize("algo", ["max", "most_recent"])
@pytest.mark.parametrize("length", [1, 2, 4, 16])
def test_windows_and_their_scales(fmt, algo, length, full):
    """40 steps: the scale used at each, and the window, which theirs has rolled already, with a cleared slot."""
    observed = amaxes(full)[1][: 40 * 64].reshape(40, 64).copy()
    observed[::7] = 0
    ours = theirs = np.zeros((length, 64), np.float32)
    scale = their_scale = np.ones(64, np.float32)
    for amax in observed:
        ours, seen = f8.numerics.update_history(ours, amax, algo)
        scale = f8.amax_to_scale(seen, fmt, te_delayed(history=length, algo=algo), scale)
        theirs, their_scale = delayed_step(theirs, amax, their_scale, fmt, algo)
        assert_same_bits(scale, their_scale)
        assert_same_bits(np.concatenate([ours[2:], ours[:1]])[: length - 1], theirs[1:])


def test_a_margin_with_the_normal_numbers_is_divided_in_another_order():
    """TransformerEngine divides first: the quotient overflows, or the margin makes it subnormal. Ours does not."""
    tiny, huge, rule = np.float32(1e-37), np.float32(3e38), te_delayed(margin=16)
    assert delayed_scale(tiny, PREVIOUS, f8.E4M3, 16) == FLT_MAX
    assert f8.amax_to_scale(tiny, "e4m3", rule) == np.float32(448 * 2.0**-16) / tiny
    assert 0 < delayed_scale(huge, PREVIOUS, f8.E4M3, 16) < f8.amax_to_scale(huge, "e4m3", rule) == rule.lower


def test_a_subnormal_quotient_of_mx_is_rounded_twice():
    """Just above 2^-127 it becomes 2^-127 before the exponent is rounded up; the smallest power of two is the next."""
    amax = np.nextafter(np.float32(448 * 2.0**-127), np.float32(1))
    assert e8m0(amax.reshape(1), f8.E4M3) == 0
    assert f8.numerics.amax_to_e8m0(amax, "e4m3", "rceil") == 1


def test_an_infinite_amax_stays_in_their_window_and_not_in_ours():
    theirs, scale = delayed_step(np.zeros((3, 1), np.float32), np.float32([np.inf]), np.ones(1), f8.E4M3)
    assert scale == 1
    assert np.isinf(theirs).any()
    assert np.isfinite(f8.numerics.update_history(np.zeros((3, 1), np.float32), np.float32([np.inf]))[0]).all()


@formats
def test_an_infinity_saturates_or_makes_an_mx_block_large_there_and_is_nan_here(fmt):
    infinity = np.float32([np.inf])
    assert np.isnan(f8.numerics.decode(f8.numerics.encode(infinity, fmt), fmt))
    assert e8m0(infinity, fmt) == 254
    assert f8.numerics.amax_to_e8m0(infinity, fmt, "rceil") == 255
