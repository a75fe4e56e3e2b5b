"""Scales equal NumPy's for every preset, on constants and subnormals too; divisions are IEEE divisions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fp8_common
import fp8_common.jax as f8
from fp8_common import CANONICAL, DATA_FORMATS, POWER_OF_2, PRESETS, Fp8Error
from fp8_common.testing import adversarial_amax, assert_same_bits

formats = pytest.mark.parametrize("fmt", DATA_FORMATS, ids=str)
PRESET = {name: preset() for name, preset in PRESETS.items()} | {"canonical": CANONICAL, "power_of_2": POWER_OF_2}
SEED = 7


def bits(low, high, count=2**20):
    return np.random.default_rng(SEED).integers(low, high, count, np.int32).view(np.float32)


@formats
def test_a_million_divisions(fmt):
    amax = bits(1, 0x7F800000)
    assert_same_bits(f8.amax_to_scale(amax, fmt), fp8_common.amax_to_scale(amax, fmt), source=amax, seed=SEED)


@pytest.mark.parametrize("policy", PRESET.values(), ids=PRESET)
@pytest.mark.parametrize("back", [False, True], ids=["into", "back"])
def test_presets_equal_numpy(policy, back):
    amax = np.concatenate([adversarial_amax(), bits(0, 2**31 - 1, 20_000), bits(0, 0x00800000, 20_000)])
    prev = bits(0, 2**31 - 1, amax.size)
    name = "amax_to_scale_inv" if back else "amax_to_scale"
    got = getattr(f8, name)(amax, "e4m3", policy, prev)
    assert_same_bits(got, getattr(fp8_common, name)(amax, "e4m3", policy, prev), source=amax, seed=SEED)


@pytest.mark.parametrize("policy", [CANONICAL, PRESETS["deepgemm"]()], ids=["canonical", "deepgemm"])
def test_constants_and_broadcasts_are_divided_too(policy):
    """XLA turns a division by a constant or by a broadcast into a product with the reciprocal, which rounds twice."""
    amax = bits(0x3F800000, 0x40000000, 64)
    want = fp8_common.amax_to_scale_inv(amax, "e4m3", policy)
    assert_same_bits(jax.jit(lambda: f8.amax_to_scale_inv(amax, "e4m3", policy))(), want)
    spread = jax.jit(lambda a: f8.amax_to_scale_inv(jnp.broadcast_to(a, (64,)), "e4m3", policy))
    for one, other in zip(amax, want, strict=True):
        assert_same_bits(spread(one), np.broadcast_to(other, (64,)))


def test_reciprocal_of_every_kind():
    special = np.float32([0, -0.0, np.inf, -np.inf, np.nan, 2.0**126, 2.0**127, -(2.0**127), 2.0**-126, 2.0**-149])
    for scale in (special, bits(0, 0x00800000), bits(0x7E000000, 0x7F800000), bits(-(2**31), 2**31 - 1)):
        assert_same_bits(f8.reciprocal(scale), fp8_common.reciprocal(scale), source=scale, seed=SEED)


def test_previous_scale_broadcasts_and_keeps_its_bits():
    amax = np.float32([[0, 1], [np.nan, np.inf]])
    tiny = np.float32(2.0**-140)
    assert_same_bits(f8.amax_to_scale(amax, "e4m3", CANONICAL, tiny), np.float32([[tiny, 448], [tiny, tiny]]))
    with pytest.raises(Fp8Error, match=r"prev of shape \(3,\) does not broadcast to \(2, 2\)"):
        f8.amax_to_scale(amax, "e4m3", CANONICAL, np.ones(3, np.float32))


def test_16_bit_amax_is_widened():
    amax = jnp.asarray([1.5, 0.1, 3e38], jnp.bfloat16)
    assert_same_bits(f8.amax_to_scale(amax, "e5m2"), fp8_common.amax_to_scale(np.asarray(amax), "e5m2"))
    with pytest.raises(Fp8Error, match="amax must be float16, bfloat16 or float32, got float64"):
        f8.amax_to_scale(np.float64(1), "e5m2")
