"""Codes are decoded two at a time on CPUs where their number and their place allow it: the same values either way."""

import numpy as np
import pytest
import torch

import fp8_common as f8
from fp8_common.testing import assert_same_bits
from fp8_common.torch.rounding import values

VIEWS = {
    **{f"{a}:{b}": lambda x, a=a, b=b: x[a:b] for a, b in ((0, 256), (1, 256), (1, 255), (2, 256), (0, 0), (3, 4))},
    "turned": lambda x: x.reshape(16, 16).T,
    "strided": lambda x: x.reshape(16, 16)[:, ::3],
    "cut": lambda x: x.reshape(16, 16)[1::2, 1:],
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fmt", [f8.E4M3, f8.E5M2], ids=str)
@pytest.mark.parametrize("view", VIEWS)
def test_values_are_those_of_the_definition_wherever_the_codes_lie(fmt, dtype, view):
    every = np.arange(256, dtype=np.uint8)[::-1].copy()
    found = values(VIEWS[view](torch.from_numpy(every)), fmt, dtype)
    assert found.dtype == dtype
    assert_same_bits(found, torch.from_numpy(f8.numerics.decode(VIEWS[view](every), fmt)).to(dtype))
