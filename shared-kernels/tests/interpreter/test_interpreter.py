"""Triton's interpreter: its errors as shipped, and that the replacements do not have them."""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

import fp8_common as f8
from fp8_common._kernels import device as ptx
from fp8_common.testing import all_bfloat16, assert_same_bits
from tests.helpers.interpreter import assemble


@triton.jit
def convert_kernel(x_ptr, y_ptr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + at, tl.load(x_ptr + at).to(tl.float32).to(tl.float8e4nv))


def mismatches():
    """How many of all bfloat16 values Triton's own conversion rounds differently from the oracle."""
    x = all_bfloat16()
    y = torch.empty(x.size, dtype=torch.float8_e4m3fn)
    with np.errstate(all="ignore"):
        convert_kernel[(16,)](torch.from_numpy(x.view(np.int16)).view(torch.bfloat16), y, 4096)
    # a GPU's conversion saturates infinity, too; the kernels make NaN of it before
    got, want = y.view(torch.uint8).numpy(), f8.encode(np.clip(x.astype(np.float32), -448, 448), "e4m3")
    nan = np.isnan(f8.decode(got, "e4m3")) & np.isnan(f8.decode(want, "e4m3"))
    return int(((got != want) & ~nan).sum())


def test_conversion_as_shipped_is_still_wrong():
    # When this fails, Triton's interpreter has changed: see whether the replacement can go.
    assert mismatches() > 0


def test_conversion_is_exact_when_replaced():
    assert mismatches() == 0


@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
def test_packed_rows_are_the_codes_and_their_columns(fmt):
    rng = np.random.default_rng(0)
    rows = [(rng.normal(size=(6, 8)) * 100).astype(np.float32) for _ in range(4)]
    asm = {"e4m3": ptx.PACK_ROWS_E4M3, "e5m2": ptx.PACK_ROWS_E5M2}[fmt].value
    *codes, words = assemble(asm, rows, [8, 8, 8, 8, 32], 4)
    for row, got in zip(rows, codes, strict=True):
        assert_same_bits(got, f8.encode(row, fmt), fmt=fmt, source=row)
    columns = words.view(np.uint8).reshape(6, 8, 4)
    assert_same_bits(columns, np.stack(codes, axis=-1))
