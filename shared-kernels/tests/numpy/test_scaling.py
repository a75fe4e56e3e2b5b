"""The canonical scale: every row of its table, and IEEE division for a million amax."""

import numpy as np
import pytest

import fp8_common as f8
from fp8_common.testing import assert_same_bits

SEED = 11
MAX, TINY, INF, NAN = np.finfo(np.float32).max, 2.0**-149, np.inf, np.nan


def above(x):
    return np.nextafter(np.float32(x), np.float32(np.inf))


def below(x):
    return np.nextafter(np.float32(x), np.float32(0))


THIRD = np.float32(448) / np.float32(3)
# policy, previous scale, amax, scales for E4M3
TABLE = {
    "unusable amax keep the previous scale": (f8.CANONICAL, 3.5, [0.0, -0.0, INF, NAN, 448], [3.5] * 4 + [1]),
    "or 1.0 without one": (f8.CANONICAL, None, [0.0, INF, NAN], [1.0] * 3),
    "powers of two do, too": (f8.POWER_OF_2, 3.5, [0.0], [3.5]),
    "division, whatever the sign": (f8.CANONICAL, None, [448.0, 3.0, -3.0], [1, THIRD, THIRD]),
    "limits": (f8.CANONICAL, None, [448 * 2.0**-100, below(448 * 2.0**-100), TINY, MAX], [*[2.0**100] * 3, 448 / MAX]),
    "below eps": (f8.ScalePolicy(eps=0.5), 3.5, [0.25, 0.5, 0.0], [896, 896, 3.5]),
    "zero is eps": (f8.ScalePolicy(eps=0.5, zero="eps"), 3.5, [0.0], [896]),
    "a margin": (f8.ScalePolicy(margin=2), None, [1.0], [112]),
    "a negative margin": (f8.ScalePolicy(margin=-1), None, [1.0], [896]),
    "a margin at the lower limit": (f8.ScalePolicy(margin=16), None, [MAX], [2.0**-126]),
    "mantissas are cleared": (f8.POWER_OF_2, None, [1.0, 1.75, above(1.75), TINY], [256, 256, 128, 2.0**100]),
    "scales of their own": (f8.CANONICAL, [5, 6], [[0, 448], [INF, 224]], [[5, 1], [5, 2]]),
    "none": (f8.CANONICAL, None, np.zeros((0, 3)), np.zeros((0, 3))),
    "one": (f8.CANONICAL, None, 2.0, 224),
}


@pytest.mark.parametrize("name", TABLE)
def test_the_table(name):
    policy, prev, amax, want = TABLE[name]
    previous = None if prev is None else np.float32(prev)
    assert_same_bits(
        f8.amax_to_scale(np.asarray(amax, np.float32), "e4m3", policy, previous), np.asarray(want, np.float32)
    )


@pytest.mark.parametrize("fmt", f8.formats.DATA_FORMATS, ids=str)
def test_a_million_scales_and_reciprocals_are_ieee_quotients(fmt):
    amax = np.random.default_rng(SEED).integers(1, 0x7F800000, 1_000_000, dtype=np.int32).view(np.float32)
    # float64 has more than twice the bits of float32, so rounding its quotient again rounds the exact one
    want = np.clip(fmt.max / amax.astype(np.float64), 2.0**-126, 2.0**100).astype(np.float32)
    back = (1.0 / want.astype(np.float64)).astype(np.float32)
    assert_same_bits(f8.amax_to_scale(amax, fmt), want, source=amax, seed=SEED)
    assert_same_bits(f8.numerics.reciprocal(want), back, source=want, seed=SEED)
    assert_same_bits(f8.numerics.amax_to_scale_inv(amax, fmt), back, source=amax, seed=SEED)
    if fmt.name in ("e4m3", "e5m2"):
        assert (back != amax / np.float32(fmt.max)).mean() > 0.2, "amax over the maximum is another number"
    full, floor = want.astype(np.float64), np.ldexp(1.0, np.frexp(want.astype(np.float64))[1] - 1)
    assert_same_bits(f8.amax_to_scale(amax, fmt, f8.POWER_OF_2), floor.astype(np.float32), source=amax)
    assert (floor <= full).all()


STABLE = {"stable": True, "power_of_2": True}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"margin": 17}, "margin must be an integer from -16 to 16, got 17"),
        ({"margin": True}, "margin must be an integer"),
        ({"eps": 1e-40}, "eps must be 0 or a normal positive float32"),
        ({"zero": "eps"}, 'zero="eps" requires eps > 0'),
        ({"zero": "two"}, "zero must be one of 'previous', 'one', 'eps', got 'two'"),
        ({"algo": "min"}, "algo must be one of 'max', 'most_recent', got 'min'"),
        ({"history": -1}, "history must be 0"),
        ({"history": 2.0}, "history must be 0"),
        ({"stable": True}, "stable=True requires power_of_2=True"),
        ({**STABLE, "margin": -1}, "stable=True requires .*, margin=-1"),
        ({**STABLE, "margin": 14}, "stable=True requires .*, margin=14"),
        ({**STABLE, "history": 2}, "stable=True requires .*, history=2"),
        ({**STABLE, "formula": "e8m0"}, "stable=True requires .* mx"),
        ({"lower": 2.0, "upper": 1.0}, "lower must be positive and below upper"),
    ],
)
def test_invalid_policies_raise(settings, message):
    with pytest.raises(f8.Fp8Error, match=message):
        f8.ScalePolicy(**settings)
