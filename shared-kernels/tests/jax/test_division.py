"""Division, rounded to nearest whatever the device's own is good for."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp8_common.formats import FORMATS
from fp8_common.jax import numerics
from fp8_common.jax.numerics import divide_nearest, nearest_quotient

SIGNIFICANDS = np.arange(2**23, dtype=np.int32) | np.int32(numerics.ONE_BITS)
"""The bits of every float32 in [1, 2)."""


TOPS = sorted({float(np.frexp(fmt.max)[0] * 2) for fmt in FORMATS.values()} | {1.0})
"""The significands of the greatest values, and of one."""


@pytest.mark.matrix("each", top=TOPS, above=[False, True])
def test_every_significand_is_mended_from_every_estimate(top, above):
    """Scales and reciprocals divide `top`, DeepGEMM's rule divides by it; a GPU's quotient is up to two units off."""
    every = SIGNIFICANDS.view(np.float32)
    numerator, denominator = (every, np.full_like(every, top)) if above else (np.full_like(every, top), every)
    expected = numerator / denominator
    for units in range(-2, 3):
        estimate = (expected.view(np.int32) + np.int32(units)).view(np.float32)
        got = np.asarray(jax.jit(nearest_quotient)(estimate, numerator, denominator))
        np.testing.assert_array_equal(got.view(np.int32), expected.view(np.int32))


def gpu_quotient(numerator, denominator):
    """What `div.full.f32` may return: two units too many, and zero for denominators above 2^126."""
    off = jax.lax.bitcast_convert_type(numerator / denominator, jnp.int32) + 2
    return jnp.where(denominator > 2.0**126, 0.0, jax.lax.bitcast_convert_type(off, jnp.float32))


def test_other_devices_divide_as_cpus_do(monkeypatch):
    """What every device but a CPU compiles, on random bits, with a division as wrong as a GPU's."""
    random = np.random.default_rng(3)
    above, below = random.integers(2**23, 0x7F800000, (2, 200_000), dtype=np.int32).view(np.float32)
    with np.errstate(over="ignore", under="ignore"):
        expected = above / below
    expected = np.where(expected < np.finfo(np.float32).tiny, np.float32(0), expected)
    exact = np.asarray(jax.jit(numerics._corrected_quotient)(above, below))
    np.testing.assert_array_equal(exact, expected)
    monkeypatch.setattr(numerics.lax, "div", gpu_quotient)
    mended = np.asarray(jax.jit(lambda *pair: numerics._corrected_quotient(*pair))(above, below))
    np.testing.assert_array_equal(mended, expected)
    assert (np.asarray(gpu_quotient(jnp.asarray(above), jnp.asarray(below))) != expected).mean() > 0.5


@pytest.mark.parametrize("function", [divide_nearest, numerics._corrected_quotient])
def test_subnormal_and_special_numbers_divide_as_in_ieee(function):
    nan, infinity = np.float32(np.nan), np.float32(np.inf)
    above = np.float32([0, 0, 1, 1, infinity, infinity, nan, 1])
    below = np.float32([0, 1, 0, infinity, infinity, 2, 1, nan])
    np.testing.assert_array_equal(function(above, below), np.float32([nan, 0, infinity, 0, nan, infinity, nan, nan]))


def test_only_cpus_are_trusted_to_divide():
    """On a GPU no scale may come straight from a division of the device."""
    text = jax.jit(lambda x: divide_nearest(448.0, x)).trace(jnp.ones(4)).lower(lowering_platforms=("cuda",)).as_text()
    assert "stablehlo.shift_left" in text
    on_cpu = jax.jit(lambda x: divide_nearest(448.0, x)).lower(jnp.ones(4)).as_text()
    assert "stablehlo.divide" in on_cpu
    assert "stablehlo.shift_left" not in on_cpu
