"""MX block scales: integer operations against an independent derivation in float64."""

import numpy as np
import pytest

from fp8_common import (
    DATA_FORMATS,
    E8M0,
    Fp8Error,
    amax_to_e8m0,
    amax_to_scale,
    amax_to_scale_inv,
    decode,
    e8m0_to_scale,
    e8m0_to_scale_inv,
)
from fp8_common.policy import MX_MODES
from fp8_common.presets import mx
from fp8_common.testing import adversarial_amax, all_codes, assert_same_bits

SEED = 5
formats = pytest.mark.parametrize("fmt", DATA_FORMATS, ids=str)
modes = pytest.mark.parametrize("mode", MX_MODES)


def amaxes():
    drawn = np.random.default_rng(SEED).integers(0, 0x80000000, 100_000, dtype=np.int64).astype(np.int32)
    return np.concatenate([adversarial_amax(), drawn.view(np.float32)])


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
    if mode == "floor":
        power = log2_floor(a) - fmt.max_exponent
    elif mode == "ceil":
        power = log2_ceil(a) - fmt.max_exponent
    elif mode == "even":
        # the mantissa to fmt.mantissa_bits, halves away from zero; a carry raises the exponent
        step = np.ldexp(1.0, log2_floor(a) - fmt.mantissa_bits)
        power = log2_floor(np.floor(a / step + 0.5) * step) - fmt.max_exponent
    else:
        if mode == "stable":
            step = np.ldexp(1.0, log2_floor(a) - fmt.mantissa_bits)
            a = np.rint(a / step) * step  # ties to even
        power = log2_ceil(a / fmt.max)
    code = np.where(usable, np.clip(power + 127, 0, 254), 0)
    return np.where(np.isfinite(exact), code, 255).astype(np.uint8)


@formats
@modes
def test_codes_equal_the_float64_derivation(fmt, mode):
    amax = amaxes()
    found = amax_to_e8m0(amax, fmt, mode)
    assert_same_bits(found, by_float64(amax, fmt, mode), fmt=E8M0, source=amax, seed=SEED)


@pytest.mark.parametrize(
    ("mode", "amax", "want"),
    [
        ("floor", 256.0, 127),
        ("floor", 511.0, 127),
        ("ceil", 256.0, 127),
        ("ceil", 257.0, 128),
        ("even", 479.9, 127),
        ("even", 496.0, 128),
        ("rceil", 448.0, 127),
        ("rceil", float(np.nextafter(np.float32(448), np.float32(512))), 128),
        ("rceil", 224.0, 126),
        ("rceil", 232.0, 127),
        ("stable", 232.0, 126),
        ("stable", float(np.nextafter(np.float32(232), np.float32(240))), 127),
        *((mode, 0.0, 0) for mode in MX_MODES),
        *((mode, 2.0**-149, 0) for mode in MX_MODES),
        *((mode, np.inf, 255) for mode in MX_MODES),
        *((mode, np.nan, 255) for mode in MX_MODES),
    ],
)
def test_cases_for_e4m3(mode, amax, want):
    assert int(amax_to_e8m0(np.float32(amax), "e4m3", mode)) == want


@formats
def test_rceil_is_the_smallest_scale_without_saturation(fmt):
    amax = amaxes()
    amax = amax[np.isfinite(amax) & (amax >= 2.0**-100)].astype(np.float64)
    codes = amax_to_e8m0(amax.astype(np.float32), fmt, "rceil")
    back = decode(codes, E8M0).astype(np.float64)
    assert (amax / back <= fmt.max).all()
    assert (amax / (back / 2) > fmt.max).all()


def test_every_code_becomes_a_power_of_two_both_ways():
    codes = all_codes(E8M0)
    power = np.append(np.ldexp(1.0, np.arange(255) - 127), np.nan)
    assert_same_bits(e8m0_to_scale_inv(codes), power.astype(np.float32), source=codes)
    assert_same_bits(e8m0_to_scale(codes), (1 / power).astype(np.float32), source=codes)


@modes
def test_the_mx_policy_gives_the_same_scales(mode):
    amax = amaxes()
    codes = amax_to_e8m0(amax, "e5m2", mode)
    assert_same_bits(amax_to_scale(amax, "e5m2", mx(mode)), e8m0_to_scale(codes), source=amax)
    assert_same_bits(amax_to_scale_inv(amax, "e5m2", mx(mode)), e8m0_to_scale_inv(codes), source=amax)


def test_rceil_is_the_default_and_the_sign_is_ignored():
    assert int(amax_to_e8m0(np.float32(-449), "e4m3")) == int(amax_to_e8m0(np.float32(449), "e4m3", "rceil")) == 128


def test_bad_input_is_refused():
    with pytest.raises(Fp8Error, match="mode must be one of floor, ceil, even, rceil, stable, got 'round'"):
        amax_to_e8m0(np.float32(1), "e4m3", "round")
    with pytest.raises(Fp8Error, match="E8M0 holds block scales"):
        amax_to_e8m0(np.float32(1), E8M0)
    with pytest.raises(Fp8Error, match="amax must be float16, bfloat16 or float32, got float64"):
        amax_to_e8m0(np.float64(1), "e4m3")
