"""Scales of torchao and flax, as installed, equal ours bit for bit where amax is finite, on a million amax and more."""

import importlib
from types import ModuleType

import jax
import numpy as np
import pytest
import torch

from conformance_implementations import IMPLEMENTATIONS, NUMPY, as_tensor, eager
from fp8_common import E4M3, E5M2, Format, ScalePolicy, amax_to_scale
from fp8_common.formats import DATA_FORMATS
from fp8_common.presets import te_current, te_delayed
from fp8_common.testing import adversarial_amax, assert_same_bits

SEED = 31
COUNT = 2**20
INF = 0x7F800000


def peer(module: str) -> ModuleType:
    """Import a peer's module, or skip and say why: nothing but these tests needs it."""
    try:
        return importlib.import_module(module)
    except ImportError as missing:
        return pytest.skip(f"{module} cannot be imported, so its preset is not compared with it: {missing}")


def amaxes(low: float = 0.0, end: int = INF) -> np.ndarray:
    """Return amax from `low` up to the key `end`: random bit patterns, and the corners of every rule."""
    start = int(np.float32(low).view(np.int32))
    drawn = np.random.default_rng(SEED).integers(start, end, COUNT, np.int32)
    corners = adversarial_amax().view(np.int32)
    return np.concatenate([drawn, corners[(corners >= start) & (corners < end)]]).view(np.float32)


def assert_all_give(want: object, full: bool, name: str, fmt: Format, policy: ScalePolicy, *arrays: np.ndarray) -> None:
    """Compare a scale function of NumPy, PyTorch and JAX with what a peer gave; compiled ones with --full."""
    for one in (NUMPY, *IMPLEMENTATIONS):
        if full or one.prepare is eager:
            compute = one.prepare(lambda inputs, one=one: [getattr(one.f8, name)(inputs[0], fmt, policy, *inputs[1:])])
            (got,) = compute([one.array(array) for array in arrays])
            assert_same_bits(got, want, source=arrays[0], seed=SEED, name=one.name)


@pytest.mark.parametrize("fmt", DATA_FORMATS, ids=str)
def test_torchao(fmt, full):
    theirs = peer("torchao.float8.float8_utils").amax_to_scale
    amax, dtype = amaxes(), getattr(torch, fmt.dtype_name)
    assert_all_give(theirs(as_tensor(amax), dtype), full, "amax_to_scale", fmt, te_current(eps=1e-12), amax)
    # theirs makes every value 0 or NaN there; ours is 1.0, so that a NaN or an infinity stays the only one
    assert_same_bits(theirs(torch.tensor([torch.inf, torch.nan]), dtype), np.float32([0, np.nan]))


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=str)
def test_torchao_rounds_some_powers_of_two_up_which_ours_does_not(fmt):
    """torchao computes exp2(floor(log2(scale))): just below a power of two the logarithm rounds up to it."""
    theirs = peer("torchao.float8.float8_utils").amax_to_scale
    amax = amaxes()
    got = amax_to_scale(amax, fmt, te_current(pow2=True, eps=1e-12))
    want = theirs(as_tensor(amax), getattr(torch, fmt.dtype_name), round_scales_to_power_of_2=True).numpy()
    differs = got != want
    assert np.array_equal(want[differs], 2 * got[differs])
    assert (amax_to_scale(amax, fmt, te_current(eps=1e-12))[differs] < want[differs]).all()
    assert differs.mean() < 1e-4


@pytest.mark.parametrize("margin", [0, 3, -1])
@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=str)
def test_flax(fmt, margin, full):
    """flax stores the scale that goes back. Subnormal amax and results are left out: its own XLA code flushes them."""
    theirs = peer("flax.linen.fp8_ops").compute_scale
    amax = np.concatenate([amaxes(low=fmt.max * 2.0**-122), np.float32([0, np.inf, np.nan])])
    previous = np.random.default_rng(SEED).uniform(0.01, 100, amax.size).astype(np.float32)
    want = jax.jit(lambda amax, scale: theirs(amax, scale, fmt.max, margin))(amax, previous)
    # Ours takes the scale into FP8; theirs derives it from the stored one by the same division.
    into = np.float32(1) / previous
    assert_all_give(want, full, "amax_to_scale_inv", fmt, te_delayed(margin=margin), amax, into)
