"""Optimizer state in FP8: fp8-te-init's tensors hold the bits of the NumPy definition."""

from pathlib import Path

import numpy as np
import pytest
import torch

from fp8_common import E4M3, E5M2, POWER_OF_2, Format, amax_to_scale, decode, encode_stochastic
from fp8_common._moments import Moments, dequantize_moments, moment_bits, quantize_moments
from fp8_common.testing import assert_same_bits
from fp8_common.torch import _moments as definition
from fp8_common.torch import _moments_compiled
from fp8_te_init._masters import moments


def numbers(columns: int) -> np.ndarray:
    """Return rows of very different sizes, with zeros, a row of zeros, subnormals and one number that is not finite."""
    rng = np.random.default_rng(columns)
    rows = 2.0 ** rng.uniform(-60, 30, (24, 1)) * rng.standard_normal((24, columns)) ** 3
    x = rows.astype(np.float32)
    x[1] = 0
    x[2, ::3] = 0
    x[3] = np.arange(columns, dtype=np.int32).view(np.float32)
    x[4, 0] = np.inf
    x[5, 0] = np.nan
    return x


@pytest.mark.parametrize("columns", [1, 100, 128, 300])
@pytest.mark.parametrize("name", ["exp_avg", "exp_avg_sq"])
@pytest.mark.parametrize("compiled", [False, True])
def test_torch_holds_the_bits_of_the_definition(name, columns, compiled):
    squares = name in moments.SQUARES
    assert not compiled or _moments_compiled.compiled_moments("cpu", squares=squares), (
        "compiled code makes other bits, and is not used"
    )
    x = np.abs(numbers(columns)) if squares else numbers(columns)
    for step in (1, 2, 1000, 1 << 20):
        expected = quantize_moments(x, step, squares=squares)
        packed = moments.packed(name, torch.from_numpy(x), step, compiled=compiled)
        assert_same_bits(packed[name + moments.CODES].numpy() & 0x7F, expected.codes & 0x7F)
        assert_same_bits(packed[name + moments.EXPONENTS].numpy(), expected.exponents)
        # the sign of a NaN is the processor's choice
        numeric = expected.codes & 0x7F != 0x7F
        assert (packed[name + moments.CODES].numpy() == expected.codes)[numeric].all()
        back = moments.unpacked(packed, compiled=compiled)[name].numpy()
        again = dequantize_moments(Moments(*(part.numpy() for part in packed.values())), squares=squares)
        assert_same_bits(np.nan_to_num(back), np.nan_to_num(again))
        assert (np.isnan(back) == np.isnan(again)).all()


def test_compiled_rounding_is_that_of_the_definition_where_bits_decide_narrowly():
    """A number goes up if its place between two codes is above (2 k + 1) 2^-24: its own places, and those beside it."""
    k = np.random.default_rng(0).integers(0, 1 << 23, 20_000)
    places = np.stack([2 * k, 2 * k + 1, np.minimum(2 * k + 2, 2**24 - 1)]).astype(np.float32) * np.float32(2.0**-24)
    x = np.concatenate([places * np.float32(2.0**-9), 8 + places, np.float32(2.0**8) + 32 * places])
    random = np.concatenate([np.broadcast_to(k, places.shape)] * 3).astype(np.uint32) << 9
    found = _moments_compiled._encoded(torch.from_numpy(x), torch.from_numpy(random.view(np.int32)))
    assert_same_bits(found.numpy().astype(np.uint8), encode_stochastic(x, E4M3, random))


def test_random_bits_are_those_of_the_definition():
    x = numbers(128)
    for step in (0, 1, 12345, (1 << 31) + 7):
        bits = definition.hashed_bits(torch.from_numpy(x), definition.step_bits(step))
        assert_same_bits(bits.numpy().view(np.uint32), moment_bits(x, step))


# ---------------------------------------------------------------- errors

PAGE = Path(__file__).parents[2] / "docs/guides/te-init.md"


def second_moments() -> np.ndarray:
    """Return running means of squares, beta 0.95, of normal gradients whose sizes are log-normal within each block."""
    rng = np.random.default_rng(5)
    sizes = np.exp(2 * rng.standard_normal((256, 128)))
    v = np.zeros((256, 128))
    for _ in range(60):
        v = 0.95 * v + 0.05 * (sizes * rng.standard_normal(sizes.shape)) ** 2
    return v.astype(np.float32)


def stored(v: np.ndarray, fmt: Format, *, root: bool) -> np.ndarray:
    """Return what a format with power-of-two scales of blocks of 128 gives back, rounded stochastically."""
    x = np.sqrt(v) if root else v
    scale = amax_to_scale(x.max(1, keepdims=True), fmt, POWER_OF_2)
    scaled = (x * scale).astype(np.float32)
    back = decode(encode_stochastic(scaled, fmt, moment_bits(scaled, 1)), fmt) / scale
    return back * back if root else back


WAYS = {
    "root in E4M3, never 0 (in use)": lambda v: dequantize_moments(quantize_moments(v, 1, squares=True), squares=True),
    "root in E4M3": lambda v: stored(v, E4M3, root=True),
    "E4M3": lambda v: stored(v, E4M3, root=False),
    "E5M2": lambda v: stored(v, E5M2, root=False),
}


@pytest.mark.parametrize("way", WAYS)
def test_errors_of_second_moments_are_those_of_the_guide(way):
    v = second_moments()
    back = WAYS[way](v)
    error = np.median(np.abs(back / v - 1))
    line = next(line for line in PAGE.read_text().splitlines() if line.startswith(f"| {way} |"))
    expected = f"| {way} | {int((back == 0).sum()):,} of {v.size:,} | {error:.3f} | {(back / v).max():.1f} |"
    assert line == expected
