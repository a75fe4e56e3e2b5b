"""Kernels of lists of tensors equal the NumPy definition bit for bit, and a list's table is made once."""

import numpy as np
import pytest
import torch

import fp8_common as f8
from fp8_common.testing import assert_same_bits
from fp8_common.torch import foreach
from kernel_inputs import DTYPES, FORMATS, calm, planted, tensor


@pytest.mark.matrix(dtype=list(DTYPES), fmt=FORMATS)
def test_foreach_takes_odd_and_empty_tensors(dtype, fmt):
    sizes = [0, 1, 7, 16384, 16385, 0, 300 * 517]
    shards = [planted((size,), dtype, fmt) for size in sizes]
    tensors = [tensor(x) for x in shards]
    keys = foreach.amax_bits(tensors)
    assert_same_bits(keys.view(torch.float32), np.array([f8.amax(x) for x in shards], np.float32))
    scales = np.linspace(0.5, 40, len(sizes)).astype(np.float32)
    made = foreach.quantize(tensors, tensor(scales), f8.formats.get_format(fmt))
    for got, x, scale in zip(made, shards, scales, strict=True):
        assert_same_bits(got, f8.quantize(x, scale, fmt), fmt=fmt, source=x)


def test_foreach_takes_unaligned_tensors():
    whole = tensor(calm((5000,), "bfloat16"))
    parts = [whole[1:100], whole[100:4001], whole[4001:]]
    keys = foreach.amax_bits(parts)
    assert [key.view(torch.float32).item() for key in keys] == [part.abs().max().item() for part in parts]


def test_a_new_output_needs_no_new_table(monkeypatch):
    tensors = [tensor(calm((size,), dtype)) for size, dtype in ((33, "bfloat16"), (70, "float32"), (5, "bfloat16"))]
    scales, sent = tensor(np.array([1, 2, 4], np.float32)), []
    made = torch.tensor
    monkeypatch.setattr(torch, "tensor", lambda *a, **k: (sent.append(a), made(*a, **k))[1])
    outputs = [foreach.quantize(tensors, scales, f8.E4M3) for _ in range(3)]
    assert len({parts[0].data_ptr() for parts in outputs}) == 3
    assert len(sent) == 4, "two transfers for each dtype, once"
    for i, x in enumerate(tensors):
        want = f8.quantize(x.float().cpu().numpy(), np.float32(2.0**i), "e4m3")
        for parts in outputs:
            assert_same_bits(parts[i], want, fmt="e4m3")
