"""Messages of gradients as codes, made of torch's own operations: the definition in NumPy, byte for byte."""

import ml_dtypes
import numpy as np
import pytest
import torch

import fp8_common as f8
from fp8_common._gradient_compression import MessageRows, round_gradients, sum_rounded
from fp8_common.testing import assert_same_bits
from fp8_common.torch import _gradients as gradients

RANKS, LENGTH, WIDE = 3, 300, 5


def rows_of(kind):
    """Gradients of many magnitudes; "spoiled" ones hold infinity and NaN, "huge" ones reach the end of float32."""
    generator = np.random.default_rng(0)
    rows = (generator.standard_normal((RANKS, LENGTH)) * np.exp2(generator.integers(-30, 20, (RANKS, 1)))).astype(
        np.float32
    )
    rows[:, :40], rows[1, 50] = 0, -0.0
    if kind == "spoiled":
        rows[0, 130], rows[1, 7], rows[2, 299] = np.inf, np.nan, -np.inf
    if kind == "huge":
        rows[0], rows[1:] = 3.4e38, -1e38
    return rows


@pytest.mark.parametrize("block", [128, 50])
@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
@pytest.mark.parametrize("random", [None, (7 | 5 << 32, 11)], ids=["nearest", "stochastic"])
@pytest.mark.parametrize("kind", ["calm", "spoiled", "huge"])
def test_messages_equal_the_definition(kind, random, fmt, block):
    rows, config = rows_of(kind), f8.GradientCompression(format=fmt, block=block)
    kept = np.random.default_rng(1).standard_normal(rows.shape).astype(ml_dtypes.bfloat16)
    residual = torch.from_numpy(kept.view(np.int16).copy()).view(torch.bfloat16)
    values, wide = torch.from_numpy(rows), torch.from_numpy(rows[:, :WIDE])
    message = gradients.pack_gradients(values, wide, config.fp8_format, block, residual, random)
    want = round_gradients(rows, config, residual=kept, random=random)
    layout = MessageRows(compressed=LENGTH, wide_bytes=4 * WIDE, block=block)
    scales = message[:, layout.scales_at :][:, : 4 * layout.scales].contiguous().view(torch.float32)
    assert message.shape == (RANKS, layout.nbytes)
    assert_same_bits(message[:, :LENGTH].contiguous(), want.codes, fmt=fmt, source=rows)
    assert_same_bits(scales, want.scales)
    assert_same_bits(residual, want.lost.astype(ml_dtypes.bfloat16))
    total, rest = gradients.sum_gradients(message, LENGTH, WIDE, torch.float32, config.fp8_format, block, 3)
    assert_same_bits(total, sum_rounded(want.codes, want.scales, config, 3))
    assert_same_bits(rest, sum(rows[1:, :WIDE], rows[0, :WIDE]) / np.float32(3))
    every, _ = gradients.unpack_gradients(message, LENGTH, WIDE, torch.float32, config.fp8_format, block)
    definition = f8.dequantize_blockwise(want.codes, want.scales, fmt, (1, block))
    assert_same_bits(every, definition.reshape(-1))


def test_rows_without_codes_or_without_wide_elements():
    rows = torch.from_numpy(rows_of("calm"))
    for values, wide in ((rows, rows[:, :0]), (rows[:, :0], rows)):
        message = gradients.pack_gradients(values, wide, f8.E4M3, 128)
        sizes = values.shape[1], wide.shape[1]
        sums = gradients.sum_gradients(message, *sizes, torch.float32, f8.E4M3, 128)
        assert tuple(part.numel() for part in sums) == sizes


def test_what_lies_between_the_sections_of_a_message_is_zero():
    layout = MessageRows(compressed=LENGTH, wide_bytes=4 * WIDE, block=128)
    message = gradients.pack_gradients(torch.ones(2, LENGTH), torch.ones(2, WIDE), f8.E4M3, 128)
    assert layout.gaps == ((300, 304), (316, 320), (340, 352))
    assert [message[:, a:b].any().item() for a, b in layout.gaps] == [False] * 3


def test_the_next_message_takes_the_next_random_bits_and_keeps_what_it_lost():
    rows, counter = torch.from_numpy(rows_of("calm")), torch.tensor([7, 11, 300])
    kept, expected = (torch.zeros(rows.shape, dtype=torch.bfloat16) for _ in range(2))
    for offset in (11, 311):
        found = gradients.pack_next_gradients(rows, rows[:, :0], f8.E4M3, 128, kept, counter)
        wanted = gradients.pack_gradients(rows, rows[:, :0], f8.E4M3, 128, expected, (7, offset))
        assert torch.equal(found, wanted)
        assert torch.equal(kept, expected)
    assert counter.tolist() == [7, 611, 300]
