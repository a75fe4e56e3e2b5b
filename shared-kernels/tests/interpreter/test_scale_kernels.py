"""Kernels of scales and of delayed scaling equal the NumPy definition bit for bit, under every policy."""

import numpy as np
import pytest

import fp8_common as f8
from fp8_common.presets import te_delayed
from fp8_common.testing import adversarial_amax, assert_same_bits
from fp8_common.torch import casts, delayed
from kernel_inputs import FORMATS, SEED, tensor
from tests import golden

MIXED_ANSWERS = [
    f8.ScalePolicy(zero=zero, nonfinite=nonfinite, eps=1e-6 * (zero == "eps"))
    for zero in ("previous", "one", "eps")
    for nonfinite in ("previous", "one")
]


POLICIES = [*MIXED_ANSWERS, *(policy for policy in golden.POLICIES.values() if policy.formula != "e8m0")]


@pytest.mark.parametrize("policy", POLICIES, ids=lambda p: f"{p.name}-{p.margin}-{p.power_of_2}-{p.zero}-{p.nonfinite}")
@pytest.mark.parametrize("fmt", FORMATS)
def test_every_policy_on_every_kind_of_amax(fmt, policy):
    amax = adversarial_amax()
    scale, inverse = casts.scales(tensor(amax), None, f8.formats.get_format(fmt), policy)
    assert_same_bits(scale, f8.amax_to_scale(amax, fmt, policy), source=amax)
    assert_same_bits(inverse, f8.numerics.reciprocal(f8.amax_to_scale(amax, fmt, policy)), source=amax)
    x = amax[:, None]
    got = casts.quantize_dynamic(tensor(x), f8.formats.get_format(fmt), policy, (1, 0))
    want = f8.quantize_rowwise(x, fmt, policy=policy)
    assert_same_bits(got.scale, want.scale, source=x)
    assert_same_bits(got.codes, want.data, fmt=fmt, source=x)


@pytest.mark.parametrize("algo", ["max", "most_recent"])
@pytest.mark.parametrize("length", [1, 3, 16])
def test_delayed_update_of_all_tensors_at_once(algo, length):
    rng = np.random.default_rng(SEED)
    policy, kinds = te_delayed(algo=algo), [f8.E4M3, f8.E5M2]
    history = (rng.random((length, 37)) * 10).astype(np.float32)
    observed = (rng.random(37) * 10).astype(np.float32)
    history[:, 3], observed[3:8] = 0, [0, np.inf, np.nan, 1e-40, 1e30]
    scale = (rng.random(37) + 0.5).astype(np.float32)
    fmax = np.array([kinds[i % 2].max for i in range(37)], np.float32)
    new_history, new_scale, inverse = delayed.update_by_kernel(
        tensor(history), tensor(observed), tensor(scale), tensor(fmax), policy
    )
    want_history, amax = f8.numerics.update_history(history, observed, algo)
    want = np.array([f8.amax_to_scale(a, kinds[i % 2], policy, scale[i]) for i, a in enumerate(amax)])
    assert_same_bits(new_history, want_history)
    assert_same_bits(new_scale, want)
    assert_same_bits(inverse, f8.numerics.reciprocal(want))
