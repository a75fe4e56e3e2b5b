"""The canonical scale: every row of its table, and IEEE division for a million amax."""

import numpy as np
import pytest

from fp8_common import (
    CANONICAL,
    DATA_FORMATS,
    FORMATS,
    POWER_OF_2,
    Fp8Error,
    ScalePolicy,
    amax_to_scale,
    amax_to_scale_inv,
    decode,
    quantize,
    reciprocal,
)
from fp8_common.testing import adversarial_amax, assert_same_bits

SEED = 11
formats = pytest.mark.parametrize("fmt", DATA_FORMATS, ids=str)
F32_MAX = np.finfo(np.float32).max
TINY = 2.0**-149
EPS = ScalePolicy(eps=0.5)


def above(x):
    return np.nextafter(np.float32(x), np.float32(np.inf))


def below(x):
    return np.nextafter(np.float32(x), np.float32(0))


@pytest.mark.parametrize(
    ("policy", "amax", "prev", "want"),
    [
        # key == 0: previous, or 1.0 without one
        (CANONICAL, 0.0, 3.5, 3.5),
        (CANONICAL, 0.0, None, 1.0),
        (CANONICAL, -0.0, 3.5, 3.5),
        (POWER_OF_2, 0.0, 3.5, 3.5),
        # infinite or NaN
        (CANONICAL, np.inf, 3.5, 3.5),
        (CANONICAL, np.inf, None, 1.0),
        (CANONICAL, np.nan, 3.5, 3.5),
        (CANONICAL, np.nan, None, 1.0),
        # below eps
        (EPS, 0.25, None, 896.0),
        (EPS, 0.5, None, 896.0),
        (ScalePolicy(eps=0.5, zero="eps"), 0.0, 3.5, 896.0),
        (EPS, 0.0, 3.5, 3.5),
        # division
        (CANONICAL, 448.0, 3.5, 1.0),
        (CANONICAL, 3.0, None, np.float32(448) / np.float32(3)),
        (CANONICAL, -3.0, None, np.float32(448) / np.float32(3)),
        (ScalePolicy(margin=2), 1.0, None, 112.0),
        (ScalePolicy(margin=-1), 1.0, None, 896.0),
        # limits
        (CANONICAL, 448 * 2.0**-100, None, 2.0**100),
        (CANONICAL, below(448 * 2.0**-100), None, 2.0**100),
        (CANONICAL, TINY, None, 2.0**100),
        (CANONICAL, F32_MAX, None, np.float32(448) / F32_MAX),
        (ScalePolicy(margin=16), F32_MAX, None, 2.0**-126),
        # powers of two: the mantissa is cleared, just below a power too
        (POWER_OF_2, 1.0, None, 256.0),
        (POWER_OF_2, 1.75, None, 256.0),
        (POWER_OF_2, above(1.75), None, 128.0),
        (POWER_OF_2, TINY, None, 2.0**100),
        # other shapes and dtypes
        (CANONICAL, np.float16(2), None, 224.0),
        (CANONICAL, np.float32([[0, 448], [np.inf, 224]]), np.float32([5, 6]), [[5, 1], [5, 2]]),
        (CANONICAL, np.zeros((0, 3)), None, np.zeros((0, 3))),
    ],
)
def test_the_table(policy, amax, prev, want):
    amax, previous = np.asarray(amax, getattr(amax, "dtype", None)), None if prev is None else np.float32(prev)
    amax = amax.astype(np.float32) if amax.dtype == np.float64 else amax
    assert_same_bits(amax_to_scale(amax, "e4m3", policy, previous), np.float32(want))


@formats
def test_a_million_scales_and_reciprocals_are_ieee_quotients(fmt):
    amax = np.random.default_rng(SEED).integers(1, 0x7F800000, 1_000_000, dtype=np.int32).view(np.float32)
    # float64 has more than twice the bits of float32, so rounding its quotient again rounds the exact one
    want = np.clip(fmt.max / amax.astype(np.float64), 2.0**-126, 2.0**100).astype(np.float32)
    back = (1.0 / want.astype(np.float64)).astype(np.float32)
    assert_same_bits(amax_to_scale(amax, fmt), want, source=amax, seed=SEED)
    assert_same_bits(reciprocal(want), back, source=want, seed=SEED)
    assert_same_bits(amax_to_scale_inv(amax, fmt), back, source=amax, seed=SEED)
    if fmt.name in ("e4m3", "e5m2"):
        assert (back != amax / np.float32(fmt.max)).mean() > 0.2, "amax over the maximum is another number"
    full, floor = want.astype(np.float64), np.ldexp(1.0, np.frexp(want.astype(np.float64))[1] - 1)
    assert_same_bits(amax_to_scale(amax, fmt, POWER_OF_2), floor.astype(np.float32), source=amax)
    assert (floor <= full).all()


@formats
@pytest.mark.parametrize("margin", [-16, 0, 3, 16])
def test_scale_and_reciprocal_stay_normal(fmt, margin):
    scale = amax_to_scale(adversarial_amax(), fmt, ScalePolicy(margin=margin))
    for values in (scale, reciprocal(scale)):
        assert (values >= 2.0**-126).all()
        assert np.isfinite(values).all()


@formats
def test_the_cap_sends_every_float32_subnormal_to_zero(fmt):
    subnormal = np.array([1, 2, 0x400000, 0x7FFFFF], np.uint32).view(np.float32)
    assert amax_to_scale(subnormal, fmt).tolist() == [2.0**100] * 4
    assert decode(quantize(subnormal, np.float32(2.0**100), fmt), fmt).tolist() == [0] * 4


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: amax_to_scale(np.float64(1), "e4m3"), "amax must be float16, bfloat16 or float32, got float64"),
        (lambda: reciprocal(np.int64(1)), "scale must be float16, bfloat16 or float32, got int64"),
        (lambda: amax_to_scale(np.float32(1), FORMATS["e8m0"]), "E8M0 holds block scales"),
    ],
)
def test_bad_input_is_refused(call, message):
    with pytest.raises(Fp8Error, match=message):
        call()


STABLE = {"stable": True, "power_of_2": True}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"margin": 17}, "margin must be an integer from -16 to 16, got 17"),
        ({"margin": 0.5}, "margin must be an integer"),
        ({"margin": True}, "margin must be an integer"),
        ({"eps": -1.0}, "eps must be 0 or a normal positive float32"),
        ({"eps": 1e-40}, "eps must be 0 or a normal positive float32"),
        ({"zero": "eps"}, 'zero="eps" needs eps > 0'),
        ({"zero": "two"}, "zero must be one of 'previous', 'one', 'eps', got 'two'"),
        ({"nonfinite": "x"}, "nonfinite must be one of"),
        ({"formula": "x"}, "formula must be one of"),
        ({"mx_mode": "x"}, "mx_mode must be one of 'floor', 'ceil', 'even', 'rceil', 'stable', got 'x'"),
        ({"algo": "min"}, "algo must be one of 'max', 'most_recent', got 'min'"),
        ({"history": -1}, "history must be 0"),
        ({"history": 2.0}, "history must be 0"),
        ({"stable": True}, "stable=True needs power_of_2=True"),
        ({**STABLE, "margin": -1}, "stable=True needs .*, margin=-1"),
        ({**STABLE, "margin": 14}, "stable=True needs .*, margin=14"),
        ({**STABLE, "history": 2}, "stable=True needs .*, history=2"),
        ({**STABLE, "formula": "descale"}, "stable=True needs .* mx"),
        ({"lower": 2.0, "upper": 1.0}, "lower must be positive and below upper"),
        ({"lower": 0.0}, "lower must be positive and below upper"),
    ],
)
def test_policies_refuse_what_nothing_could_honour(settings, message):
    with pytest.raises(Fp8Error, match=message):
        ScalePolicy(**settings)
