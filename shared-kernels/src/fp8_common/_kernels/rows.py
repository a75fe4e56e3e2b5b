"""Row-wise kernels: short rows, long rows, and rows with columns.

With `fold_ptr`, column n of x is first multiplied by `fold[n]`, in float32. The backward of a row-wise scaled weight
needs this: the row scales of the weight are folded into the gradient, so one FP8 copy of the weight serves both passes.
Rows in groups, whose int32 indices are in `group_ptr`, are multiplied by `fold[group[m], n]`.

Row-wise matmuls contract activations and gradients over columns once, and over rows once. `amax_both` computes the amax
of rows and columns, and `cast_both` casts with the scales of both; only rows are folded. Dims: x_MN and y_MN are
[M, N], yt_NM is [N, M], scale_M and group_M are [M], fold is [N] or [groups, N].
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
    to_fp8_rows,
    widen_key,
)
from fp8_common._kernels.launch import (
    Launch,
    Out,
    codes,
    input_dtype,
    matrix_sizes,
    next_power_of_2,
    plan,
    scale_constants,
    tile_count,
)
from fp8_common._kernels.tensor import rows_of_four, store_columns
from fp8_common.formats import Format
from fp8_common.policy import CANONICAL, ScalePolicy

LONGEST_ROW = 16384
"""Length of the longest row that one program holds in registers."""


@triton.jit
def load_values(x_ptr, fold_ptr, at, fold_at, mask, fold_mask):
    """Load x, multiplied by `fold` if that is not None.

    Folded values are float32; other values have the dtype of x.
    """
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
    """Cast rows with row scales, in one pass; BN >= N.

    scale[m] is computed from max |x[m, :]|, and y[m, :] = fp8(x[m, :] * scale[m]).
    """
    # The row remains in registers between its amax and its cast, so x is read once.
    if ALIGNED:
        N = multiple_of_16(N)
    r = tl.program_id(0) * BM + tl.arange(0, BM)
    c = tl.arange(0, BN)[None, :]
    at, mask = r[:, None].to(tl.int64) * N + c, (r[:, None] < M) & (c < N)
    if group_ptr is None:
        x = load_values(x_ptr, fold_ptr, at, c, mask, c < N)
    else:
        # All rows of a group read the same folds, from the cache.
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
    """Cast rows of any length, with one program per row.

    A row is read twice, the second time from the L2 cache.
    """
    if ALIGNED:
        N = multiple_of_16(N)
    r = tl.program_id(0)
    row = r.to(tl.int64) * N
    c = tl.arange(0, BN)
    fold_row = 0 if group_ptr is None else tl.load(group_ptr + r).to(tl.int64) * N
    # One key per column of the tile, reduced once after the loop. Keys are never negative, so narrow keys keep their
    # value in int32.
    key = tl.zeros((BN,), tl.int32)
    for start in range(0, N, BN):
        mask = start + c < N
        x = load_values(x_ptr, fold_ptr, row + start + c, fold_row + start + c, mask, mask)
        key = tl.maximum(key, narrow_key(x).to(tl.int32))
    top = tl.max(key, axis=0)
    # Folded values are float32, so their keys are float32 keys already.
    if fold_ptr is None:
        top = widen_key(top, x_ptr.dtype.element_ty)
    scale = scale_of_key(top, 1.0, FMAX, RULE)
    for start in range(0, N, BN):
        mask = start + c < N
        x = load_values(x_ptr, fold_ptr, row + start + c, fold_row + start + c, mask, mask)
        tl.store(y_ptr + row + start + c, to_fp8(scaled(x, scale), y_ptr.dtype.element_ty), mask=mask)
    tl.store(scale_ptr + r, scale)
    store_reciprocal(scale_inv_ptr, r, scale, None)


@triton.jit(do_not_specialize=["M", "N"])
def amax_both_kernel(
    x_ptr,
    fold_ptr,
    amax_ptr,
    M: tl.int32,
    N: tl.int32,
    ALIGNED: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """Raise the amax keys of folded rows and of columns.

    amax[m] is the key of max |x[m, :] * fold|, amax[M + n] is the key of max |x[:, n]|. All keys are zero before the
    launch.
    """
    if ALIGNED:
        M, N = multiple_of_16(M), multiple_of_16(N)
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    tiles_n = tl.cdiv(N, BN)
    r = (tl.program_id(0) // tiles_n) * BM + tl.arange(0, BM)
    c = (tl.program_id(0) % tiles_n) * BN + tl.arange(0, BN)
    mask = (r < M)[:, None] & (c < N)[None, :]
    x = tl.load(x_ptr + r[:, None].to(tl.int64) * N + c[None, :], mask=mask, other=0.0)
    # One atomic per row and per column of a tile. A maximum does not depend on their order.
    tl.atomic_max(amax_ptr + M + c, widen_key(tl.max(narrow_key(x), axis=0), DTYPE), mask=c < N, sem="relaxed")
    if fold_ptr is not None:
        folded = x.to(tl.float32) * tl.load(fold_ptr + c, mask=c < N, other=0.0)[None, :]
        key = tl.max(narrow_key(folded), axis=1)
    else:
        key = widen_key(tl.max(narrow_key(x), axis=1), DTYPE)
    tl.atomic_max(amax_ptr + r, key, mask=r < M, sem="relaxed")


@triton.jit
def store_row(y_ptr, x, scale_ptr, fold, r, at, mask, M):
    """Fold, cast and store a tile of rows r, with row scales."""
    scale = tl.load(scale_ptr + r, mask=r < M, other=0.0)[:, None]
    v = x if fold is None else x.to(tl.float32) * fold
    tl.store(y_ptr + at, to_fp8(scaled(v, scale), y_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["M", "N"])
def cast_both_kernel(
    x_ptr,
    fold_ptr,
    scale_ptr,
    y_ptr,
    yt_ptr,
    M: tl.int32,
    N: tl.int32,
    ALIGNED: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """Cast folded rows, and columns transposed; M % 4 == 0.

    y[m, :] = fp8(x[m, :] * fold * scale[m]), and yt[n, :] = fp8(x[:, n] * scale[M + n]).
    """
    if ALIGNED:
        M, N = multiple_of_16(M), multiple_of_16(N)
    # Tiles are in reverse order after the pass for the amax, as in `cast_kernel`.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    tiles_n = tl.cdiv(N, BN)
    m0, n0 = (tile // tiles_n) * BM, (tile % tiles_n) * BN
    c = n0 + tl.arange(0, BN)
    fold = None if fold_ptr is None else tl.load(fold_ptr + c, mask=c < N, other=0.0)[None, :]
    at, mask = rows_of_four(m0, n0, M, N, BM, BN)
    x0 = tl.load(x_ptr + at, mask=mask, other=0.0)
    x1 = tl.load(x_ptr + at + N, mask=mask, other=0.0)
    x2 = tl.load(x_ptr + at + 2 * N, mask=mask, other=0.0)
    x3 = tl.load(x_ptr + at + 3 * N, mask=mask, other=0.0)
    r = m0 + 4 * tl.arange(0, BM // 4)
    store_row(y_ptr, x0, scale_ptr, fold, r, at, mask, M)
    store_row(y_ptr, x1, scale_ptr, fold, r + 1, at + N, mask, M)
    store_row(y_ptr, x2, scale_ptr, fold, r + 2, at + 2 * N, mask, M)
    store_row(y_ptr, x3, scale_ptr, fold, r + 3, at + 3 * N, mask, M)
    scale = tl.load(scale_ptr + M + c, mask=c < N, other=0.0)[None, :]
    F8: tl.constexpr = y_ptr.dtype.element_ty
    _, _, _, _, words = to_fp8_rows(scaled(x0, scale), scaled(x1, scale), scaled(x2, scale), scaled(x3, scale), F8)
    store_columns(yt_ptr, words, m0, n0, M, N, BM, BN)


@triton.jit
def scale_of_rows(key, DTYPE: tl.constexpr, scale_inv_ptr, r, inside, FMAX: tl.constexpr, RULE: tl.constexpr):
    """Return the scales of rows r [rows, 1], and store their reciprocals.

    `key` has the narrow keys of each row, reduced over the tiles of the row only.
    """
    scale = scale_of_key(widen_key(tl.max(key, axis=1), DTYPE), 1.0, FMAX, RULE)
    store_reciprocal(scale_inv_ptr, r, scale, inside)
    return scale[:, None]


@triton.jit(do_not_specialize=["M", "N"])
def rowwise_transposed_kernel(
    x_ptr,
    y_ptr,
    yt_ptr,
    scale_inv_ptr,
    M: tl.int32,
    N: tl.int32,
    FMAX: tl.constexpr,
    RULE: tl.constexpr,
    ALIGNED: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """Cast rows with row scales, and store codes and transposed codes.

    x is a stack of matrices [M, N], one after the other; M % 4 == 0. x is read twice, the second time from the L2
    cache.
    """
    if ALIGNED:
        M, N = multiple_of_16(M), multiple_of_16(N)
    tiles_m = tl.cdiv(M, BM)
    # first row of the matrix
    first = (tl.program_id(0) // tiles_m).to(tl.int64) * M
    m0 = (tl.program_id(0) % tiles_m) * BM
    x_ptr += first * N
    y_ptr += first * N
    yt_ptr += first * N
    scale_inv_ptr += first
    r = m0 + 4 * tl.arange(0, BM // 4)
    inside = r < M
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    k0 = narrow_key(tl.zeros((BM // 4, BN), DTYPE))
    k1, k2, k3 = k0, k0, k0
    for n in range(0, N, BN):
        at, mask = rows_of_four(m0, n, M, N, BM, BN)
        k0 = tl.maximum(k0, narrow_key(tl.load(x_ptr + at, mask=mask, other=0.0)))
        k1 = tl.maximum(k1, narrow_key(tl.load(x_ptr + at + N, mask=mask, other=0.0)))
        k2 = tl.maximum(k2, narrow_key(tl.load(x_ptr + at + 2 * N, mask=mask, other=0.0)))
        k3 = tl.maximum(k3, narrow_key(tl.load(x_ptr + at + 3 * N, mask=mask, other=0.0)))
    s0 = scale_of_rows(k0, DTYPE, scale_inv_ptr, r, inside, FMAX, RULE)
    s1 = scale_of_rows(k1, DTYPE, scale_inv_ptr, r + 1, inside, FMAX, RULE)
    s2 = scale_of_rows(k2, DTYPE, scale_inv_ptr, r + 2, inside, FMAX, RULE)
    s3 = scale_of_rows(k3, DTYPE, scale_inv_ptr, r + 3, inside, FMAX, RULE)
    F8: tl.constexpr = y_ptr.dtype.element_ty
    for n in range(0, N, BN):
        at, mask = rows_of_four(m0, n, M, N, BM, BN)
        x0 = tl.load(x_ptr + at, mask=mask, other=0.0)
        x1 = tl.load(x_ptr + at + N, mask=mask, other=0.0)
        x2 = tl.load(x_ptr + at + 2 * N, mask=mask, other=0.0)
        x3 = tl.load(x_ptr + at + 3 * N, mask=mask, other=0.0)
        q0, q1, q2, q3, words = to_fp8_rows(scaled(x0, s0), scaled(x1, s1), scaled(x2, s2), scaled(x3, s3), F8)
        tl.store(y_ptr + at, q0, mask=mask)
        tl.store(y_ptr + at + N, q1, mask=mask)
        tl.store(y_ptr + at + 2 * N, q2, mask=mask)
        tl.store(y_ptr + at + 3 * N, q3, mask=mask)
        store_columns(yt_ptr, words, m0, n, M, N, BM, BN)


@plan
def rowwise(
    m: int,
    n: int,
    dtype: str,
    fmt: str | Format,
    policy: ScalePolicy = CANONICAL,
    *,
    fold: bool = False,
    groups: bool = False,
    inverse: bool = True,
) -> Launch:
    """Plan the cast of x [m, n] with one scale per row.

    With `fold`, element [m, n] is first multiplied by float32 `fold_ptr` [n]. With `groups`, `fold_ptr` is [groups, n],
    and int32 `group_ptr` [m] has the group of each row of x. The outputs are codes and float32 scales [m]; with
    `inverse` also the scales back from FP8.
    """
    # The sides of Triton's tiles are powers of two; elements after the row are masked.
    bn = max(16, next_power_of_2(n))
    if n > LONGEST_ROW:
        # Longer rows do not fit in the registers of one program: they are read twice, in tiles.
        kernel, grid, tile, warps = rowwise_long_kernel, m, {"BN": 4096}, 8
    else:
        # Short rows share a program. A warp holds 1024 elements, 32 per thread, so the longest row needs 16 warps.
        bm = max(1, 4096 // bn)
        kernel, grid, tile, warps = rowwise_kernel, tile_count(m, bm), {"BM": bm, "BN": bn}, max(4, bm * bn // 1024)
    scales = ("scale_ptr", "scale_inv_ptr") if inverse else ("scale_ptr",)
    return Launch(
        kernel=kernel,
        grid=grid if n else 0,
        inputs={
            "x_ptr": input_dtype(dtype),
            "fold_ptr": "float32" if fold else None,
            "group_ptr": "int32" if groups else None,
        },
        outputs={"y_ptr": codes((m, n), fmt)} | dict.fromkeys(scales, Out((m,), "float32")),
        scalars=matrix_sizes(m, n),
        constants=scale_constants(fmt, policy) | {"ALIGNED": n % 16 == 0} | tile,
        num_warps=warps,
    )


@plan
def amax_both(m: int, n: int, dtype: str, *, fold: bool = False) -> Launch:
    """Plan the int32 amax keys [m + n] of rows, then columns.

    x is [m, n]. With `fold`, the amax of rows is that of x[m, n] * fold[n], float32; the amax of columns is that of x.
    """
    return Launch(
        kernel=amax_both_kernel,
        grid=tile_count(m, 128) * tile_count(n, 128),
        inputs={"x_ptr": input_dtype(dtype), "fold_ptr": "float32" if fold else None},
        outputs={"amax_ptr": Out((m + n,), "int32", zeroed=True)},
        scalars=matrix_sizes(m, n),
        constants={"ALIGNED": m % 16 == n % 16 == 0, "BM": 128, "BN": 128},
        num_warps=4,  # with 8, an H100 reaches three quarters of this bandwidth
    )


@plan
def cast_both(m: int, n: int, dtype: str, fmt: str | Format, *, fold: bool = False) -> Launch:
    """Plan casts of x [m, n] by rows and by columns.

    Codes by columns are transposed. `scale_ptr` has the float32 scales [m + n] of rows, then columns. With `fold`, the
    row cast is that of x[m, n] * fold[n], float32; the column cast is that of x. m % 4 == 0. The outputs are codes
    [m, n] and [n, m].
    """
    return Launch(
        kernel=cast_both_kernel,
        grid=tile_count(m, 128) * tile_count(n, 64),
        inputs={
            "x_ptr": input_dtype(dtype),
            "fold_ptr": "float32" if fold else None,
            "scale_ptr": "float32",
        },
        outputs={"y_ptr": codes((m, n), fmt), "yt_ptr": codes((n, m), fmt)},
        scalars=matrix_sizes(m, n),
        # the tile of `cast_transpose`, for the same reason
        constants={"ALIGNED": m % 16 == n % 16 == 0, "BM": 128, "BN": 64},
        num_warps=4,
    )


@plan
def rowwise_transposed(
    m: int, n: int, dtype: str, fmt: str | Format, policy: ScalePolicy = CANONICAL, count: int = 1
) -> Launch:
    """Plan row-wise casts of `count` matrices [m, n] in both layouts.

    The outputs are codes [count * m, n], the same codes transposed [count * n, m], and float32 scales back
    [count * m]; m % 4 == 0. Weights are cast this way: in a matmul with the transpose, their row scales are folded into
    the other operand.
    """
    return Launch(
        kernel=rowwise_transposed_kernel,
        grid=count * tile_count(m, 32) if n else 0,
        inputs={"x_ptr": input_dtype(dtype)},
        outputs={
            "y_ptr": codes((count * m, n), fmt),
            "yt_ptr": codes((count * n, m), fmt),
            "scale_inv_ptr": Out((count * m,), "float32"),
        },
        scalars=matrix_sizes(m, n),
        # 32 rows are 8 words of the transpose; with more rows there are fewer programs than multiprocessors
        constants=scale_constants(fmt, policy) | {"ALIGNED": m % 16 == n % 16 == 0, "BM": 32, "BN": 256},
        num_warps=8,
    )
