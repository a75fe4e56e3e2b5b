"""A float32 number from its code and its lower three bytes: which numbers come back, and that the others are found."""

import numpy as np
import pytest

from fp8_common import DATA_FORMATS, decode, get_format, quantize, quantize_blockwise, quantize_rowwise
from fp8_common._blocks import expand_blocks
from fp8_common._remainder import SCALE_INV_RANGE, anchors, join_lower_bytes, lower_bytes, not_joined
from fp8_common.testing import adversarial, all_bfloat16, assert_same_bits, midpoints

FORMATS = [fmt.name for fmt in DATA_FORMATS]
SCALES = [*(float(np.float32(s)) for s in (1.0, 0.7, 3.1e-5, 1234.5, 2.0**-126, 2.0**100, 2.0**-110, 5.9e20)), 448 / 3]
ODD_SCALES = [0.0, np.inf, np.nan, 2.0**-149, 3e38]


def joined(x: np.ndarray, scale: object, fmt: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the codes of `x`, what is joined of them, and where that is said to be something else."""
    codes = quantize(x, scale, fmt)
    return codes, join_lower_bytes(codes, scale, lower_bytes(x), fmt), not_joined(x, codes, scale, fmt)


def check(x: np.ndarray, scale: object, fmt: str) -> tuple[np.ndarray, np.ndarray]:
    codes, back, failed = joined(x, scale, fmt)
    assert_same_bits(np.where(failed, x, back), x)
    assert (back.view(np.uint32)[failed] != x.view(np.uint32)[failed]).all()
    return codes, failed


def between(codes: np.ndarray, fmt: str) -> np.ndarray:
    """Return where codes are neither 0 nor the largest, nor NaN."""
    magnitude = codes & 0x7F
    return (magnitude > 0) & (magnitude < get_format(fmt).max_code)


@pytest.mark.matrix(fmt=FORMATS, scale=SCALES)
def test_every_bfloat16_comes_back(fmt, scale):
    x = all_bfloat16().astype(np.float32)
    codes, failed = check(x, np.float32(scale), fmt)
    inverse = np.float32(1) / np.float32(scale)
    if SCALE_INV_RANGE[0] <= inverse <= SCALE_INV_RANGE[1]:
        assert not (failed & between(codes, fmt)).any()
        if not get_format(fmt).fnuz:
            assert not failed[x == 0].any(), "zeros of both signs need no place of their own"


@pytest.mark.matrix(fmt=FORMATS, scale=ODD_SCALES)
def test_scales_that_are_no_use_lose_nothing(fmt, scale):
    check(all_bfloat16().astype(np.float32), np.float32(scale), fmt)


@pytest.mark.matrix(fmt=FORMATS, scale=SCALES[:4])
def test_both_ends_of_what_rounds_to_a_code_come_back(fmt, scale):
    """Around every midpoint between codes, 64 float32 numbers on either side."""
    ends = np.unique(np.abs(midpoints(fmt).astype(np.float32))) / np.float32(scale)
    bits = ends.astype(np.float32).view(np.int32)[:, None] + np.arange(-64, 65, dtype=np.int32)
    x = np.abs(bits.clip(0, 0x7F7FFFFF)).astype(np.int32).view(np.float32).reshape(-1)
    for signed in (x, -x):
        codes, failed = check(signed, np.float32(scale), fmt)
        assert not (failed & between(codes, fmt)).any()


@pytest.mark.matrix(fmt=FORMATS)
def test_what_needs_a_place_of_its_own(fmt):
    """Under half of what rounds to 0 near its upper end, and what saturates by more than a factor of 3."""
    found = get_format(fmt)
    rng = np.random.default_rng(0)
    x = rng.uniform(0, 3.4 * found.max, 100_000).astype(np.float32)
    _, failed = check(x, np.float32(1), fmt)
    assert not (failed & (x > found.smallest_subnormal / 2)).any()
    tiny = rng.uniform(found.smallest_subnormal * 0.15, found.smallest_subnormal / 2, 10_000).astype(np.float32)
    assert not check(tiny, np.float32(1), fmt)[1].any()
    above = rng.uniform(3.6 * found.max, 100 * found.max, 1000).astype(np.float32)
    assert check(above, np.float32(1), fmt)[1].all()


def test_few_normally_distributed_numbers_need_a_place_of_their_own():
    x = np.random.default_rng(1).standard_normal(1_000_000).astype(np.float32)
    assert check(x, np.float32(448) / np.abs(x).max(), "e4m3")[1].mean() < 1e-5


@pytest.mark.matrix(fmt=["e4m3", "e5m2"])
def test_rows_and_blocks(fmt):
    x = adversarial(fmt)
    with np.errstate(over="ignore"):
        wide = np.resize(x[np.isfinite(x)], (200, 300)).astype(np.float64) * 2.0 ** np.arange(-20, 180)[:, None]
        x = np.where(np.abs(wide) < 1e38, wide, 0).astype(np.float32)
    check(x, quantize_rowwise(x, fmt).scale, fmt)
    check(x, expand_blocks(quantize_blockwise(x, fmt, (128, 128)).scale, (128, 128), x.shape), fmt)


def test_random_numbers_come_back(full):
    """10^6 random float32 bit patterns, each with a scale of its own; 10^7 under --full (10^8 with torch)."""
    rng = np.random.default_rng(2)
    for fmt in FORMATS:
        for _ in range(10 if full else 1):
            bits = rng.integers(0, 1 << 32, 250_000, dtype=np.uint32)
            scale = rng.integers(1 << 23, 227 << 23, 250_000, dtype=np.int32).view(np.float32)
            check(bits.view(np.float32), scale, fmt)


def test_lower_bytes_do_not_depend_on_the_scale():
    x = np.random.default_rng(3).standard_normal(10_000).astype(np.float32)
    lower = lower_bytes(x)
    for scale in np.float32([100, 33.3, 7.7]):
        codes = quantize(x, scale, "e4m3")
        failed = not_joined(x, codes, scale, "e4m3")
        assert_same_bits(np.where(failed, x, join_lower_bytes(codes, scale, lower, "e4m3")), x)


@pytest.mark.matrix(fmt=FORMATS)
def test_anchors_are_near_their_codes(fmt):
    value, anchor = decode(np.arange(256, dtype=np.uint8), fmt), anchors(get_format(fmt))
    ordinary = between(np.arange(256, dtype=np.uint8), fmt) & (np.abs(value) > get_format(fmt).smallest_subnormal)
    assert_same_bits(anchor[ordinary], value[ordinary])
    assert ((anchor < 0) == (np.arange(256) >= 0x80)).all()
