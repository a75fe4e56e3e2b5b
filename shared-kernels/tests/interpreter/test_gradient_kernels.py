"""Kernels of gradients that travel as codes equal the NumPy definition bit for bit."""

import numpy as np
import pytest
import torch

import fp8_common as f8
from fp8_common._reference.gradient_messages import MessageRows, round_gradients, sum_rounded
from fp8_common.testing import assert_same_bits
from fp8_common.torch_layers.sharding.gradient_messages import pack_gradients, sum_gradients
from kernel_inputs import DTYPES, FORMATS, calm, planted, tensor

GRADIENT_ROWS = [(1, 1), (2, 7), (3, 128), (2, 8192), (3, 8192 + 517), (2, 2048 + 144)]
ROUNDINGS = {"nearest": None, "stochastic": (0x123456789ABCDEF, 2**33)}


@pytest.mark.matrix(dtype=list(DTYPES), fmt=FORMATS, shape=GRADIENT_ROWS, rounding=ROUNDINGS)
def test_gradients_are_packed_as_defined(dtype, fmt, shape, rounding):
    random = ROUNDINGS[rounding]
    for x in (planted(shape, dtype, fmt), calm(shape, dtype)):
        wide = calm((shape[0], 3), dtype)
        # rows that lie apart, as the parts of a larger buffer do
        apart = torch.cat([tensor(x), tensor(x)], dim=1)[:, : shape[1]]
        message = pack_gradients(apart, tensor(wide), f8.formats.get_format(fmt), random)
        want = round_gradients(x, fmt, random=random)
        rows = MessageRows(compressed=shape[1], wide_bytes=3 * wide.itemsize)
        assert message.shape == (shape[0], rows.nbytes)
        assert_same_bits(message[:, : shape[1]].contiguous(), want.data, fmt=fmt, source=x)
        scales = message[:, rows.scales_at :][:, : 4 * rows.scales].contiguous().view(torch.float32)
        assert_same_bits(scales, want.scale)
        sent = message[:, rows.wide_at :][:, : rows.wide_bytes].contiguous()
        assert torch.equal(sent, tensor(wide).view(torch.uint8))
        assert not any(message[:, a:b].any() for a, b in rows.gaps)


@pytest.mark.matrix(fmt=FORMATS, shape=GRADIENT_ROWS, divisor=[1, 3, 8], kind=["planted", "calm", "huge"])
def test_gradients_are_added_in_the_order_of_ranks(fmt, shape, divisor, kind):
    x = planted(shape, "float32", fmt) if kind == "planted" else calm(shape, "float32")
    if kind == "huge":
        # codes of the first rank stand for 2^128, which a product fused with the sum would not turn into infinity
        x[0], x[1:] = np.float32(3.4e38), np.float32(-1e38)
    want = round_gradients(x, fmt)
    message = pack_gradients(tensor(x), tensor(x[:, :2]), f8.formats.get_format(fmt))
    sizes = shape[1], min(2, shape[1])
    total, wide = sum_gradients(message, sizes, torch.float32, f8.formats.get_format(fmt), divisor)
    assert_same_bits(total, sum_rounded(want.data, want.scale, fmt, divisor))
    expected = x[0, :2].copy()
    with np.errstate(all="ignore"):
        for row in x[1:]:
            expected += row[:2]
        assert_same_bits(wide, expected / np.float32(divisor))
