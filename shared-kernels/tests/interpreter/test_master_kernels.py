"""Kernels of exact masters in three bytes equal the NumPy definition bit for bit."""

import numpy as np
import pytest
import torch

import fp8_common as f8
from fp8_common._adamw import AdamWStep, adamw_step
from fp8_common._remainder import join_lower_bytes, lower_bytes
from fp8_common.testing import assert_same_bits
from fp8_common.torch import _triton_masters as triton_masters
from tests.helpers.kernel_inputs import DTYPES, FORMATS, calm, number, tensor


@pytest.mark.matrix(dtype=list(DTYPES), fmt=FORMATS, n=[16, 2048, 4096 + 48])
def test_masters_are_stepped_and_cast_in_their_bytes(dtype, fmt, n):
    x, form = calm(n, "float32"), f8.get_format(fmt)
    x[:4] = [0.0, -0.0, 1e-30, 3e38]
    scale, numbers = np.float32(form.max / 20), AdamWStep.of(3, lr=0.02, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1)
    gradient, first = calm(n, dtype) * DTYPES[dtype](0.01), calm(n, "float32") * np.float32(0.01)
    gradient[5] = 0
    second = np.square(calm(n, "float32")) * np.float32(1e-4)
    second[5:7] = [0, 1e-40]
    codes, lower = f8.quantize(x, scale, fmt), lower_bytes(x)
    inverse, held = f8.reciprocal(scale), [tensor(a) for a in (codes.view(np.uint8), lower, first, second)]
    key = triton_masters.step_masters(
        held[0], number(inverse), held[1], tensor(gradient), tuple(held[2:]), tensor(np.float32(numbers)), form
    )
    # what three bytes cannot give back is stepped from what they do give
    given = join_lower_bytes(codes, scale, lower, fmt)
    after, *moments = adamw_step(given, gradient.astype(np.float32), first, second, numbers)
    assert_same_bits(held[1], lower_bytes(after))
    assert_same_bits(held[0], (after.view(np.uint32) >> 24).astype(np.uint8))
    for got, want in zip(held[2:], moments, strict=True):
        assert_same_bits(got, want)
    assert_same_bits(key.view(torch.float32), np.abs(after).max(keepdims=True))
    triton_masters.cast_masters(held[0], number(scale), held[1], form)
    assert_same_bits(held[0], f8.quantize(after, scale, fmt).view(np.uint8))
