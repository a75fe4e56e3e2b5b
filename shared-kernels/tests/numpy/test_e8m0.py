"""MX block scales: integer operations against an independent derivation in float64."""

import numpy as np
import pytest

import fp8_common as f8
from fp8_common.policy import MX_MODES
from fp8_common.presets import mx
from fp8_common.testing import adversarial_amax, all_codes, assert_same_bits

SEED = 5
DRAWN = np.random.default_rng(SEED).integers(0, 2**31, 100_000, dtype=np.int64).astype(np.int32).view(np.float32)
AMAX = np.concatenate([adversarial_amax(), DRAWN])


def log2_floor(x):
    return np.frexp(x)[1] - 1


def log2_ceil(x):
    mantissa, exponent = np.frexp(x)
    return exponent - (mantissa == 0.5)


def by_float64(amax, fmt, mode):
    """The biased exponent by real arithmetic on normal amax; subnormal ones are below every limit and give 0."""
    with np.errstate(invalid="ignore"):
        exact = amax.astype(np.float64)
    usable = np.isfinite(exact) & (exact >= 2.0**-126)
    a = np.where(usable, exact, 1.0)
    step = np.ldexp(1.0, log2_floor(a) - fmt.mantissa_bits)
    if mode in ("even", "stable"):  # the mantissa to fmt.mantissa_bits, halves away from zero or to even
        a = (np.floor(a / step + 0.5) if mode == "even" else np.rint(a / step)) * step
    if mode in ("rceil", "stable"):
        power = log2_ceil(a / fmt.max)
    else:
        power = (log2_ceil(a) if mode == "ceil" else log2_floor(a)) - fmt.max_exponent
    code = np.where(usable, np.clip(power + 127, 0, 254), 0)
    return np.where(np.isfinite(exact), code, 255).astype(np.uint8)


@pytest.mark.parametrize("fmt", f8.formats.DATA_FORMATS, ids=str)
@pytest.mark.parametrize("mode", MX_MODES)
def test_codes_equal_the_float64_derivation_and_the_mx_policy_gives_their_scales(fmt, mode):
    codes = f8.numerics.amax_to_e8m0(AMAX, fmt, mode)
    assert_same_bits(codes, by_float64(AMAX, fmt, mode), fmt=f8.E8M0, source=AMAX, seed=SEED)
    assert_same_bits(f8.amax_to_scale(AMAX, fmt, mx(mode)), f8.numerics.e8m0_to_scale(codes), source=AMAX)
    assert_same_bits(
        f8.numerics.amax_to_scale_inv(AMAX, fmt, mx(mode)), f8.numerics.e8m0_to_scale_inv(codes), source=AMAX
    )
    if mode == "rceil":
        assert_same_bits(f8.numerics.amax_to_e8m0(-AMAX, fmt), codes, name="by default, and whatever the sign")


def test_every_code_becomes_a_power_of_two_both_ways():
    codes = all_codes(f8.E8M0)
    power = np.append(np.ldexp(1.0, np.arange(255) - 127), np.nan)
    assert_same_bits(f8.numerics.e8m0_to_scale_inv(codes), power.astype(np.float32), source=codes)
    assert_same_bits(f8.numerics.e8m0_to_scale(codes), (1 / power).astype(np.float32), source=codes)
