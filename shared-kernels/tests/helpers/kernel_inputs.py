"""Inputs of the tests of kernels: dtypes, formats and shapes, special values among others, tensors of their bits."""

import runpy

import ml_dtypes
import numpy as np
import pytest
import torch

from fp8_common.testing import adversarial
from tests.helpers.repository import ROOT

DTYPES = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float32": np.float32}
FORMATS = ["e4m3", "e5m2"]
SHAPES = [(1, 1), (1, 7), (300, 517), (6, 256), (128, 160), (0, 8), (8, 0)]
SEED = 4
DEVICE = "cpu"
"""Where `tensor` and `number` put what they make, and hence kernels run; the tests on a GPU replace it."""


def kernel_tests(pattern, *without):
    """Return the tests of files of the folder `interpreter` by name, to be collected elsewhere, too."""
    found = {}
    for path in sorted((ROOT / "shared-kernels/tests/interpreter").glob(pattern)):
        tests = {name: test for name, test in runpy.run_path(str(path)).items() if name.startswith("test_")}
        assert not found.keys() & tests.keys(), "tests of one name would replace each other here"
        found |= tests
    return {name: test for name, test in found.items() if name not in without}


def tensor(x):
    """Return a tensor with the bits of a NumPy array."""
    carrier = {1: np.uint8, 2: np.int16, 4: np.int32}[x.dtype.itemsize]
    bits = torch.from_numpy(np.ascontiguousarray(x).view(carrier).copy())
    return bits.view(getattr(torch, x.dtype.name)).to(DEVICE)


def number(value):
    """Return a float32 scalar tensor."""
    return torch.tensor(float(value), device=DEVICE)


def planted(shape, dtype, fmt):
    """Random values over many binades with NaN, infinity, -0, subnormals and rounding ties among them."""
    rng = np.random.default_rng(SEED)
    with np.errstate(all="ignore"):
        x = (rng.normal(size=shape) * np.exp2(rng.integers(-12, 12, size=shape))).astype(DTYPES[dtype])
    special = adversarial(fmt, DTYPES[dtype])
    flat = x.reshape(-1)
    if flat.size >= 1000:
        rows = np.arange(min(special.size, flat.size // 40)) * 37
        flat[rows] = special[: rows.size]
        flat[-40:] = special[-40:]
    elif 1 < flat.size < 10:
        flat[:] = np.resize(
            [1.0625, np.nan, -np.inf, -0.0, ml_dtypes.finfo(x.dtype).smallest_subnormal, np.inf, -3e-3], flat.size
        )
    return flat.reshape(shape)


def calm(shape, dtype):
    """The same without infinity and NaN, so that amax gives a scale."""
    rng = np.random.default_rng(SEED)
    return (rng.normal(size=shape) * 3).astype(DTYPES[dtype])


every_input = pytest.mark.matrix(dtype=list(DTYPES), fmt=FORMATS, shape=SHAPES)
