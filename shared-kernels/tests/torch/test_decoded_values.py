"""Codes are decoded two at a time on CPUs where their number and their place allow it: the same values either way."""

import numpy as np
import pytest
import torch

import fp8_common as f8
import fp8_common.torch as torch_f8
from fp8_common.torch.rounding import values


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fmt", [f8.E4M3, f8.E5M2])
@pytest.mark.parametrize(("start", "stop"), [(0, 256), (1, 256), (1, 255), (2, 256), (0, 0), (3, 4)])
def test_values_are_those_of_the_definition_wherever_the_codes_lie(fmt, dtype, start, stop):
    every = np.arange(256, dtype=np.uint8)[::-1].copy()
    found = values(torch.from_numpy(every)[start:stop], fmt, dtype)
    expected = torch.from_numpy(f8.decode(every[start:stop], fmt)).to(dtype)
    assert found.dtype == dtype
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(found.signbit()[~found.isnan()], expected.signbit()[~expected.isnan()])


def test_transposed_and_strided_codes_keep_their_places():
    codes = torch.arange(256, dtype=torch.uint8).view(16, 16)
    decoded = values(codes, f8.E5M2)
    for view in (lambda x: x.t(), lambda x: x[:, ::3], lambda x: x[1::2, 1:]):
        torch.testing.assert_close(values(view(codes), f8.E5M2), view(decoded), rtol=0, atol=0, equal_nan=True)


def test_a_scalar_has_no_blocks():
    with pytest.raises(f8.Fp8Error, match="cannot cut a tensor of 0 dimension"):
        torch_f8.dequantize_mx(torch.tensor(1, dtype=torch.uint8), torch.zeros(1, dtype=torch.uint8), "e4m3")
