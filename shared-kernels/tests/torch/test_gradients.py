"""Messages of gradients as codes, made of torch's own operations: the definition in NumPy, byte for byte."""

import numpy as np
import pytest
import torch

import fp8_common as f8
from fp8_common._reference.gradients import MessageRows, round_gradients, sum_rounded
from fp8_common.testing import assert_same_bits
from fp8_common.torch.sharding.gradients import pack_gradients, sum_gradients

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


@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
@pytest.mark.parametrize("random", [None, (7 | 5 << 32, 11)], ids=["nearest", "stochastic"])
@pytest.mark.parametrize("kind", ["calm", "spoiled", "huge"])
def test_messages_equal_the_definition(kind, random, fmt):
    rows, form = rows_of(kind), f8.get_format(fmt)
    values, wide = torch.from_numpy(rows), torch.from_numpy(rows[:, :WIDE])
    message = pack_gradients(values, wide, form, random)
    want = round_gradients(rows, fmt, random=random)
    layout = MessageRows(compressed=LENGTH, wide_bytes=4 * WIDE)
    scales = message[:, layout.scales_at :][:, : 4 * layout.scales].contiguous().view(torch.float32)
    assert message.shape == (RANKS, layout.nbytes)
    assert_same_bits(message[:, :LENGTH].contiguous(), want.data, fmt=fmt, source=rows)
    assert_same_bits(scales, want.scale)
    total, rest = sum_gradients(message, (LENGTH, WIDE), torch.float32, form, 3)
    assert_same_bits(total, sum_rounded(want.data, want.scale, fmt, 3))
    assert_same_bits(rest, sum(rows[1:, :WIDE], rows[0, :WIDE]) / np.float32(3))


def test_rows_without_codes_or_without_wide_elements():
    rows = torch.from_numpy(rows_of("calm"))
    for values, wide in ((rows, rows[:, :0]), (rows[:, :0], rows)):
        message = pack_gradients(values, wide, f8.E4M3)
        sizes = values.shape[1], wide.shape[1]
        sums = sum_gradients(message, sizes, torch.float32, f8.E4M3)
        assert tuple(part.numel() for part in sums) == sizes


def test_what_lies_between_the_sections_of_a_message_is_zero():
    layout = MessageRows(compressed=LENGTH, wide_bytes=4 * WIDE)
    message = pack_gradients(torch.ones(2, LENGTH), torch.ones(2, WIDE), f8.E4M3)
    assert layout.gaps == ((300, 304), (316, 320), (340, 352))
    assert [message[:, a:b].any().item() for a, b in layout.gaps] == [False] * 3
