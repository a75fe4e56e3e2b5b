"""Kernels that cast a matrix with a scale for each row and again with one for each column, transposed: two reads.

Row-wise products contract activation and gradient over columns once and over rows once. The first kernel finds the amax
of rows and columns, the second casts both ways. With FOLD, column n of x is multiplied by `fold[n]` first in what goes
to the rows (see `rowwise`). Dims: x_MN and y_MN are [M, N]; yt_NM is [N, M]; scales are [M] and [N].
"""

import triton
import triton.language as tl

from fp8_common._kernels.device import multiple_of_16, narrow_key, scaled, to_fp8, to_fp8_rows, widen_key
from fp8_common._kernels.transpose import load_rows, store_columns


@triton.jit(do_not_specialize=["M", "N"])
def amax_both_kernel(
    x_ptr,
    fold_ptr,
    row_ptr,
    column_ptr,
    M: tl.int32,
    N: tl.int32,
    ALIGNED: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """Raise row[m] to the key of max |x[m, :] * fold| and column[n] to that of max |x[:, n]|; both start at zero."""
    if ALIGNED:
        M, N = multiple_of_16(M), multiple_of_16(N)
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    tiles_n = tl.cdiv(N, BN)
    r = (tl.program_id(0) // tiles_n) * BM + tl.arange(0, BM)
    c = (tl.program_id(0) % tiles_n) * BN + tl.arange(0, BN)
    mask = (r < M)[:, None] & (c < N)[None, :]
    x = tl.load(x_ptr + r[:, None].to(tl.int64) * N + c[None, :], mask=mask, other=0.0)
    # no more atomics than rows and columns of tiles; a maximum does not depend on their order
    tl.atomic_max(column_ptr + c, widen_key(tl.max(narrow_key(x), axis=0), DTYPE), mask=c < N, sem="relaxed")
    if fold_ptr is not None:
        folded = x.to(tl.float32) * tl.load(fold_ptr + c, mask=c < N, other=0.0)[None, :]
        key = tl.max(narrow_key(folded), axis=1)
    else:
        key = widen_key(tl.max(narrow_key(x), axis=1), DTYPE)
    tl.atomic_max(row_ptr + r, key, mask=r < M, sem="relaxed")


@triton.jit
def store_row(y_ptr, x, row_ptr, fold, r, at, mask, M):
    """Cast a tile of rows r with their scales and store it."""
    scale = tl.load(row_ptr + r, mask=r < M, other=0.0)[:, None]
    v = x if fold is None else x.to(tl.float32) * fold
    tl.store(y_ptr + at, to_fp8(scaled(v, scale), y_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["M", "N"])
def cast_both_kernel(
    x_ptr,
    fold_ptr,
    row_ptr,
    column_ptr,
    y_ptr,
    yt_ptr,
    M: tl.int32,
    N: tl.int32,
    ALIGNED: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """Make y = fp8(x * fold * row[m]) and yt = fp8(x * column[n])^T; needs M % 4 == 0."""
    if ALIGNED:
        M, N = multiple_of_16(M), multiple_of_16(N)
    # Backwards after the pass for the amax, as in `cast_kernel`.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    tiles_n = tl.cdiv(N, BN)
    m0, n0 = (tile // tiles_n) * BM, (tile % tiles_n) * BN
    c = n0 + tl.arange(0, BN)
    fold = None if fold_ptr is None else tl.load(fold_ptr + c, mask=c < N, other=0.0)[None, :]
    x0, at, mask = load_rows(x_ptr, m0, n0, M, N, BM, BN, 0)
    x1 = tl.load(x_ptr + at + N, mask=mask, other=0.0)
    x2 = tl.load(x_ptr + at + 2 * N, mask=mask, other=0.0)
    x3 = tl.load(x_ptr + at + 3 * N, mask=mask, other=0.0)
    r = m0 + 4 * tl.arange(0, BM // 4)
    store_row(y_ptr, x0, row_ptr, fold, r, at, mask, M)
    store_row(y_ptr, x1, row_ptr, fold, r + 1, at + N, mask, M)
    store_row(y_ptr, x2, row_ptr, fold, r + 2, at + 2 * N, mask, M)
    store_row(y_ptr, x3, row_ptr, fold, r + 3, at + 3 * N, mask, M)
    scale = tl.load(column_ptr + c, mask=c < N, other=0.0)[None, :]
    F8: tl.constexpr = y_ptr.dtype.element_ty
    _, _, _, _, words = to_fp8_rows(scaled(x0, scale), scaled(x1, scale), scaled(x2, scale), scaled(x3, scale), F8)
    store_columns(yt_ptr, words, m0, n0, M, N, BM, BN)
