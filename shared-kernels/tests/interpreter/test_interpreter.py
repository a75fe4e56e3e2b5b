"""Triton's interpreter: its errors as shipped, and that the replacements do not have them."""

import numpy as np
import torch
import triton
import triton.language as tl

import fp8_common as f8
from fp8_common.testing import all_bfloat16


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
    got, want = y.view(torch.uint8).numpy(), f8.numerics.encode(np.clip(x.astype(np.float32), -448, 448), "e4m3")
    nan = np.isnan(f8.numerics.decode(got, "e4m3")) & np.isnan(f8.numerics.decode(want, "e4m3"))
    return int(((got != want) & ~nan).sum())


def test_conversion_as_shipped_is_still_wrong():
    # When this fails, Triton's interpreter has changed: see whether the replacement can go.
    assert mismatches() > 0


def test_conversion_is_exact_when_replaced():
    assert mismatches() == 0
