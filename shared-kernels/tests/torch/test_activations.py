"""silu(gate) * up and its gradient: eager PyTorch's where that can be, and tensors equal arrays."""

import ml_dtypes
import numpy as np
import pytest
import torch
import torch.nn.functional as F

import fp8_common as f8
from fp8_common.testing import assert_same_bits
from fp8_common.torch import numerics
from kernel_inputs import DTYPES, tensor

ALL = np.arange(1 << 16, dtype=np.uint16).view(ml_dtypes.bfloat16)


def drawn(seed, count, dtype="bfloat16"):
    return np.random.default_rng(seed).normal(size=count).astype(DTYPES[dtype])


def test_silu_is_that_of_eager_torch_at_every_bfloat16():
    ones = np.ones_like(ALL)
    assert_same_bits(F.silu(tensor(ALL)), f8.numerics.silu_mul(ALL, ones))
    up = drawn(0, ALL.size)
    assert_same_bits(F.silu(tensor(ALL)) * tensor(up), f8.numerics.silu_mul(ALL, up))


@pytest.mark.parametrize("dtype", DTYPES)
def test_tensors_equal_arrays(dtype):
    gate, up, grad = (drawn(seed, 1 << 16, dtype) * 4 for seed in range(3))
    gate = ALL if dtype == "bfloat16" else gate
    assert_same_bits(numerics.silu_mul(tensor(gate), tensor(up)), f8.numerics.silu_mul(gate, up))
    found = numerics.silu_mul_backward(tensor(grad), tensor(gate), tensor(up))
    wanted = *f8.numerics.silu_mul_backward(grad, gate, up), f8.numerics.silu_mul(gate, up)
    for one, other in zip(found, wanted, strict=True):
        assert_same_bits(one, other)


def test_values_are_as_near_as_float32_allows():
    x = np.concatenate([np.linspace(-88, 88, 100_001), [0.0, -0.0]]).astype(np.float32)
    exact = x.astype(np.float64) / (1 + np.exp(-x.astype(np.float64)))
    found, grads = (
        f8.numerics.silu_mul(x, np.ones_like(x)),
        f8.numerics.silu_mul_backward(np.ones_like(x), x, np.ones_like(x)),
    )
    assert np.all(np.abs(found - exact) <= 4e-7 * np.abs(exact))
    s = 1 / (1 + np.exp(-x.astype(np.float64)))
    assert np.all(np.abs(grads[0] - s * (1 + x * (1 - s))) <= 4e-7 * np.maximum(np.abs(s * x), 1))
    assert np.array_equal(grads[1], found)


def test_gradients_are_those_of_eager_torch_but_for_ties():
    count = 1 << 20
    gate, up, grad = (tensor(drawn(seed, count)) * scale for seed, scale in enumerate((3, 1, 1)))
    gate.requires_grad_()
    up.requires_grad_()
    (F.silu(gate) * up).backward(grad)
    found = numerics.silu_mul_backward(grad, gate.detach(), up.detach())
    assert torch.equal(found[1], up.grad)
    assert (found[0] != gate.grad).sum() < 1e-4 * count


def test_infinity_and_nan_stay_not_finite():
    gate = np.array([np.inf, -np.inf, np.nan, -1e30, 1e30], np.float32)
    found = f8.numerics.silu_mul(gate, np.ones_like(gate))
    assert_same_bits(torch.from_numpy(found), np.array([np.inf, np.nan, np.nan, -0.0, 1e30], np.float32))
