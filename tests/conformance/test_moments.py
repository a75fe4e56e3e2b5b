"""Optimizer state in FP8: fp8-te-init's tensors hold the bits of the NumPy definition."""

import numpy as np
import pytest
import torch

from fp8_common._moments import Moments, dequantize_moments, moment_bits, quantize_moments
from fp8_common.testing import assert_same_bits
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
def test_torch_holds_the_bits_of_the_definition(name, columns):
    squares = name in moments.SQUARES
    x = np.abs(numbers(columns)) if squares else numbers(columns)
    for step in (1, 2, 1000, 1 << 20):
        expected = quantize_moments(x, step, squares=squares)
        packed = moments.packed(name, torch.from_numpy(x), step)
        assert_same_bits(packed[name + moments.CODES].numpy() & 0x7F, expected.codes & 0x7F)
        assert_same_bits(packed[name + moments.EXPONENTS].numpy(), expected.exponents)
        # the sign of a NaN is the processor's choice
        numeric = expected.codes & 0x7F != 0x7F
        assert (packed[name + moments.CODES].numpy() == expected.codes)[numeric].all()
        back = moments.unpacked(packed)[name].numpy()
        again = dequantize_moments(Moments(*(part.numpy() for part in packed.values())), squares=squares)
        assert_same_bits(np.nan_to_num(back), np.nan_to_num(again))
        assert (np.isnan(back) == np.isnan(again)).all()


def test_random_bits_are_those_of_the_definition():
    x = numbers(128)
    for step in (0, 1, 12345, (1 << 31) + 7):
        bits = moments.random_bits(torch.from_numpy(x), step)
        assert_same_bits(bits.numpy().view(np.uint32), moment_bits(x, step))
