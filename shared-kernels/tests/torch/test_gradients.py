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
    rows = generator.standard_normal((RANKS, LENGTH)) * np.exp2(generator.integers(-30, 20, (RANKS, 1)))
    rows = rows.astype(np.float32)
    rows[:, :40], rows[1, 50] = 0, -0.0
    if kind == "spoiled":
        rows[0, 130], rows[1, 7], rows[2, 299] = np.inf, np.nan, -np.inf
    if kind == "huge":
        rows[0], rows[1:] = 3.4e38, -1e38
    return rows


@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
@pytest.mark.parametrize("random", [None, (7 | 5 << 32, 11)], ids=["nearest", "stochastic"])
@pytest.mark.parametrize("kind", ["calm", "spoiled", "huge"])
@pytest.mark.parametrize(("length", "wide"), [(LENGTH, WIDE), (LENGTH, 0), (0, LENGTH)])
def test_messages_equal_the_definition(kind, random, fmt, length, wide):
    rows, form = rows_of(kind), f8.get_format(fmt)
    message = pack_gradients(torch.from_numpy(rows[:, :length]), torch.from_numpy(rows[:, :wide]), form, random)
    total, rest = sum_gradients(message, (length, wide), torch.float32, form, 3)
    layout = MessageRows(compressed=length, wide_bytes=4 * wide)
    assert message.shape == (RANKS, layout.nbytes)
    assert not any(message[:, a:b].any() for a, b in layout.gaps)
    assert rest.shape == (wide,)
    if wide:
        with np.errstate(all="ignore"):
            assert_same_bits(rest, sum(rows[1:, :wide], rows[0, :wide]) / np.float32(3))
    if length:
        want = round_gradients(rows, fmt, random=random)
        scales = message[:, layout.scales_at :][:, : 4 * layout.scales].contiguous().view(torch.float32)
        assert_same_bits(message[:, :length].contiguous(), want.data, fmt=fmt, source=rows)
        assert_same_bits(scales, want.scale)
        assert_same_bits(total, sum_rounded(want.data, want.scale, fmt, 3))
    else:
        assert total.numel() == 0


def test_the_sections_of_a_message_begin_at_multiples_of_their_elements():
    assert MessageRows(compressed=LENGTH, wide_bytes=4 * WIDE).gaps == ((300, 304), (316, 320), (340, 352))
