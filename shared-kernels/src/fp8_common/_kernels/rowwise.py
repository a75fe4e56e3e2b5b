"""Kernels that quantize with one scale per row: short rows in one pass, long ones in two.

With FOLD, column n of x is multiplied by `fold[n]` first, in float32. That is what the backward of a row-wise scaled
weight needs: the weight's row scales move into the gradient, so one FP8 copy of the weight serves both passes. Rows in
groups, whose int32 indices are in `group_ptr`, are multiplied by `fold[group[m], n]`.
Dims: x_MN is [M, N], scale_M and group_M are [M], fold is [N] or [groups, N].
"""

import triton
import triton.language as tl

from fp8_common._kernels.device import (
    multiple_of_16,
    narrow_key,
    scale_of_key,
    scaled,
    store_reciprocal,
    to_fp8,
    widen_key,
)


@triton.jit
def load_values(x_ptr, fold_ptr, at, fold_at, mask, fold_mask):
    """Load x at these offsets, folded if there is anything to fold: float32 then, else the dtype of x."""
    x = tl.load(x_ptr + at, mask=mask, other=0.0)
    if fold_ptr is not None:
        return x.to(tl.float32) * tl.load(fold_ptr + fold_at, mask=fold_mask, other=0.0)
    else:
        return x


@triton.jit(do_not_specialize=["M", "N"])
def rowwise_kernel(
    x_ptr,
    fold_ptr,
    group_ptr,
    y_ptr,
    scale_ptr,
    scale_inv_ptr,
    M: tl.int32,
    N: tl.int32,
    FMAX: tl.constexpr,
    RULE: tl.constexpr,
    ALIGNED: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """Make scale[m] from max |x[m, :]|, y[m, :] = fp8(x[m, :] * scale[m]); BN >= N."""
    # The row stays in registers between its amax and its cast, so x is read once.
    if ALIGNED:
        N = multiple_of_16(N)
    r = tl.program_id(0) * BM + tl.arange(0, BM)
    c = tl.arange(0, BN)[None, :]
    at, mask = r[:, None].to(tl.int64) * N + c, (r[:, None] < M) & (c < N)
    if group_ptr is None:
        x = load_values(x_ptr, fold_ptr, at, c, mask, c < N)
    else:
        # The folds of a group are read by all of its rows, out of the cache.
        fold_row = tl.load(group_ptr + r, mask=r < M, other=0).to(tl.int64) * N
        x = load_values(x_ptr, fold_ptr, at, fold_row[:, None] + c, mask, mask)
    key = widen_key(tl.max(narrow_key(x), axis=1), x.dtype)
    scale = scale_of_key(key, 1.0, FMAX, RULE)
    tl.store(y_ptr + at, to_fp8(scaled(x, scale[:, None]), y_ptr.dtype.element_ty), mask=mask)
    tl.store(scale_ptr + r, scale, mask=r < M)
    store_reciprocal(scale_inv_ptr, r, scale, r < M)


@triton.jit(do_not_specialize=["M", "N"])
def rowwise_long_kernel(
    x_ptr,
    fold_ptr,
    group_ptr,
    y_ptr,
    scale_ptr,
    scale_inv_ptr,
    M: tl.int32,
    N: tl.int32,
    FMAX: tl.constexpr,
    RULE: tl.constexpr,
    ALIGNED: tl.constexpr,
    BN: tl.constexpr,
):
    """The same for rows of any length, one program per row; the second read of a row comes from the L2 cache."""
    if ALIGNED:
        N = multiple_of_16(N)
    r = tl.program_id(0)
    row = r.to(tl.int64) * N
    c = tl.arange(0, BN)
    fold_row = 0 if group_ptr is None else tl.load(group_ptr + r).to(tl.int64) * N
    # A key per column of the tile, reduced once after the loop. int32 for both widths: keys are never negative, so
    # widening one keeps its value.
    key = tl.zeros((BN,), tl.int32)
    for start in range(0, N, BN):
        mask = start + c < N
        x = load_values(x_ptr, fold_ptr, row + start + c, fold_row + start + c, mask, mask)
        key = tl.maximum(key, narrow_key(x).to(tl.int32))
    top = tl.max(key, axis=0)
    # Folded values are float32, whose keys are already wide.
    if fold_ptr is None:
        top = widen_key(top, x_ptr.dtype.element_ty)
    scale = scale_of_key(top, 1.0, FMAX, RULE)
    for start in range(0, N, BN):
        mask = start + c < N
        x = load_values(x_ptr, fold_ptr, row + start + c, fold_row + start + c, mask, mask)
        tl.store(y_ptr + row + start + c, to_fp8(scaled(x, scale), y_ptr.dtype.element_ty), mask=mask)
    tl.store(scale_ptr + r, scale)
    store_reciprocal(scale_inv_ptr, r, scale, None)
