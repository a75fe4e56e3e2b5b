"""torch's float32 from codes and lower bytes equals NumPy's, and both give back what was split."""

import numpy as np
import pytest
import torch

from fp8_common import DATA_FORMATS, get_format
from fp8_common import quantize as quantize_numpy
from fp8_common._remainder import join_lower_bytes, lower_bytes, not_joined
from fp8_common.testing import all_bfloat16, assert_same_bits
from fp8_common.torch.plugin import dispatch

FORMATS = [fmt.name for fmt in DATA_FORMATS]


def numbers() -> np.ndarray:
    rng = np.random.default_rng(0)
    ordinary = (rng.standard_normal(40_000) * 2.0 ** rng.integers(-12, 12, 40_000)).astype(np.float32)
    return np.concatenate([all_bfloat16().astype(np.float32), ordinary])


@pytest.mark.matrix(fmt=FORMATS, scale=[1.0, 0.37, 4.4e3, 2.0**-126, 2.0**100, 0.0, float("nan"), 3e38])
def test_same_numbers_as_numpy_makes(fmt, scale):
    x, one = numbers(), np.float32(scale)
    codes = quantize_numpy(x, one, fmt)
    ours, given = torch.from_numpy(x), torch.tensor(one)
    low, high = dispatch.lower_bytes(ours)
    assert_same_bits(low.numpy(), lower_bytes(x).low)
    assert_same_bits(high.numpy(), lower_bytes(x).high)
    joined = dispatch.join_lower_bytes(torch.from_numpy(codes), given, low, high, get_format(fmt))
    assert_same_bits(joined.numpy(), join_lower_bytes(codes, one, lower_bytes(x), fmt))
    places = dispatch.not_joined(ours, torch.from_numpy(codes), given, get_format(fmt))
    assert_same_bits(places.numpy(), np.flatnonzero(not_joined(x, codes, one, fmt)))


@pytest.mark.matrix(fmt=FORMATS)
def test_same_numbers_with_a_scale_for_each_row(fmt):
    x = numbers()[:65_536].reshape(256, 256)
    scale = np.random.default_rng(1).integers(60 << 23, 200 << 23, (256, 1), dtype=np.int32).view(np.float32)
    codes = quantize_numpy(x, scale, fmt)
    arguments = torch.from_numpy(codes), torch.from_numpy(scale)
    joined = dispatch.join_lower_bytes(*arguments, *dispatch.lower_bytes(torch.from_numpy(x)), get_format(fmt))
    assert_same_bits(joined.numpy(), join_lower_bytes(codes, scale, lower_bytes(x), fmt))
    places = dispatch.not_joined(torch.from_numpy(x), *arguments, get_format(fmt))
    assert_same_bits(places.numpy(), np.flatnonzero(not_joined(x, codes, scale, fmt)))


def test_all_four_bytes_need_no_code():
    x = torch.from_numpy(numbers())
    again = dispatch.join_bytes(dispatch.top_byte(x), *dispatch.lower_bytes(x))
    assert_same_bits(again.numpy(), x.numpy())


@pytest.mark.timeout(1800)
def test_random_numbers_come_back(full):
    """10^6 random float32 bit patterns by default, 10^8 under --full; many of them finite and far from any scale."""
    generator = torch.Generator().manual_seed(0)
    for index in range(400 if full else 4):
        fmt = get_format(FORMATS[index % 4])
        bits = torch.randint(-(1 << 31), 1 << 31, (250_000,), generator=generator).int()
        # half of them within what the scale is made for
        if index % 2:
            bits = (bits & -0x70000001) | 0x38000000
        x = bits.view(torch.float32)
        scale = torch.rand((), generator=generator) * 4 + 1e-3
        codes = dispatch.quantize(x, scale, fmt).view(torch.uint8)
        low, high = dispatch.lower_bytes(x)
        back = dispatch.join_lower_bytes(codes, scale, low, high, fmt)
        places = dispatch.not_joined(x, codes, scale, fmt)
        back[places] = x[places]
        assert torch.equal(back.view(torch.int32), bits)
