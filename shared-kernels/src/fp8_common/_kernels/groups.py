"""Kernels on rows in groups: amax, casts by group, and transposes.

The group of each row is an int32 index that never falls; rows of no group have the number of groups. A tile spans few
groups, one after the other, so that its programs go through those alone.
Dims: x_MN is [M, N], group_M is [M]; amax and scales are [groups, N] with COLUMNS, else [groups].
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
from fp8_common._kernels.rows import load_values
from fp8_common.errors import Fp8Error
from fp8_common.formats import Format
from fp8_common.hardware import ALIGNMENT
from fp8_common.policy import CANONICAL, ScalePolicy

LONGEST_ROW = 8192
"""Rows up to this length stay in the registers of a program that casts columns too."""


# No pointer is given to this function: torch assumes that pointers given to a function that returns store offsets are
# written to.
@triton.jit
def places_of_tile(N, BM: tl.constexpr, BN: tl.constexpr):
    """Indices of the rows [BM] and columns [BN] of a tile."""
    tiles_n = tl.cdiv(N, BN)
    r = (tl.program_id(0) // tiles_n) * BM + tl.arange(0, BM)
    return r, (tl.program_id(0) % tiles_n) * BN + tl.arange(0, BN)


@triton.jit
def groups_of_rows(group, COUNT):
    """Load the groups of rows [BM, 1], with the first and last.

    `group` is [BM].
    """
    last = tl.max(tl.where(group < COUNT, group, -1), axis=0)
    return group[:, None], tl.min(group, axis=0), last


@triton.jit(do_not_specialize=["M", "N", "COUNT"])
def group_amax_kernel(
    x_ptr,
    group_ptr,
    amax_ptr,
    M: tl.int32,
    N: tl.int32,
    COUNT: tl.int32,
    COLUMNS: tl.constexpr,
    ALIGNED: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """Raise amax by group, or by group and column.

    `amax` is int32 [g] or [g, n], of keys of max |x|, and starts at zero.
    """
    if ALIGNED:
        N = multiple_of_16(N)
    rows, columns = places_of_tile(N, BM, BN)
    group, first, last = groups_of_rows(tl.load(group_ptr + rows, mask=rows < M, other=COUNT), COUNT)
    r, c = rows[:, None], columns[None, :]
    x = tl.load(x_ptr + r.to(tl.int64) * N + c, mask=(r < M) & (c < N), other=0.0)
    key = narrow_key(x)
    for g in range(first, last + 1):
        top = widen_key(tl.max(tl.where(group == g, key, 0), axis=0), x_ptr.dtype.element_ty)
        if COLUMNS:
            tl.atomic_max(amax_ptr + N.to(tl.int64) * g + columns, top, mask=columns < N, sem="relaxed")
        else:
            tl.atomic_max(amax_ptr + g, tl.max(top, axis=0), sem="relaxed")


@triton.jit(do_not_specialize=["M", "N", "COUNT"])
def group_cast_kernel(
    x_ptr,
    group_ptr,
    scale_ptr,
    y_ptr,
    M: tl.int32,
    N: tl.int32,
    COUNT: tl.int32,
    COLUMNS: tl.constexpr,
    ALIGNED: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """Cast rows with scales of groups, or of groups and columns.

    y[m, n] = fp8(x[m, n] * scale); rows of no group are not written.
    """
    if ALIGNED:
        N = multiple_of_16(N)
    rows, columns = places_of_tile(N, BM, BN)
    group, first, last = groups_of_rows(tl.load(group_ptr + rows, mask=rows < M, other=COUNT), COUNT)
    r, c = rows[:, None], columns[None, :]
    at, mask = r.to(tl.int64) * N + c, (r < M) & (c < N)
    x = tl.load(x_ptr + at, mask=mask, other=0.0)
    # Cast once for each group instead of choosing scales first: nearly all tiles have one group or two, and values
    # carried from one group to the next would have another layout than x.
    for g in range(first, last + 1):
        if COLUMNS:
            scale = tl.load(scale_ptr + N.to(tl.int64) * g + c, mask=c < N, other=1.0)
        else:
            scale = tl.load(scale_ptr + g)
        tl.store(y_ptr + at, to_fp8(scaled(x, scale), y_ptr.dtype.element_ty), mask=mask & (group == g))


@triton.jit(do_not_specialize=["P", "N"])
def group_columns_kernel(
    x_ptr,
    fold_ptr,
    end_ptr,
    padded_end_ptr,
    t_ptr,
    scale_inv_ptr,
    y_ptr,
    row_scale_inv_ptr,
    P: tl.int32,
    N: tl.int32,
    FMAX: tl.constexpr,
    RULE: tl.constexpr,
    ALIGNED: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    RM: tl.constexpr,
    RN: tl.constexpr,
):
    """Cast the columns of each group, and its rows too with `y`.

    Each column of a group has a scale. Codes of columns are t [N, P]; scales back are [groups, N]. Group g ends before
    row `end[g]` of x and before column `padded_end[g]` of t, where zeros follow its codes. A program casts BN columns
    of a group; the second read comes from the L2 cache.

    y is [M, N], of rows times `fold[g]` if given; RN >= N. Rows of no group are not written. The programs of a group
    share its rows, which they have just read.
    """
    P = multiple_of_16(P)
    if ALIGNED:
        N = multiple_of_16(N)
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    tiles_n = tl.cdiv(N, BN)
    group, tile = tl.program_id(0) // tiles_n, tl.program_id(0) % tiles_n
    columns = tile * BN + tl.arange(0, BN)
    start, end = tl.load(end_ptr + group - 1, mask=group > 0, other=0), tl.load(end_ptr + group)
    first = multiple_of_16(tl.load(padded_end_ptr + group - 1, mask=group > 0, other=0))
    size = multiple_of_16(tl.load(padded_end_ptr + group) - first)
    lines, c = tl.arange(0, BM)[:, None], columns[None, :]
    key = narrow_key(tl.zeros((BM, BN), DTYPE))
    for m in range(start, end, BM):
        r = m + lines
        x = tl.load(x_ptr + r.to(tl.int64) * N + c, mask=(r < end) & (c < N), other=0.0)
        key = tl.maximum(key, narrow_key(x))
    scale = scale_of_key(widen_key(tl.max(key, axis=0), DTYPE), 1.0, FMAX, RULE)
    store_reciprocal(scale_inv_ptr, group.to(tl.int64) * N + columns, scale, columns < N)
    for m in range(0, size, BM):
        r = start + m + lines
        inside = (r < end) & (c < N)
        x = tl.load(x_ptr + r.to(tl.int64) * N + c, mask=inside, other=0.0)
        # zeros after the group for any scale, even NaN
        q = to_fp8(tl.where(inside, scaled(x, scale[None, :]), 0.0), t_ptr.dtype.element_ty)
        tl.store(t_ptr + c.to(tl.int64) * P + (first + m + lines), q, mask=(m + lines < size) & (c < N))
    if y_ptr is not None:
        share = tl.cdiv(end - start, tiles_n)
        begin = start + tile * share
        stop = tl.minimum(begin + share, end)
        k = tl.arange(0, RN)[None, :]
        for m in range(begin, stop, RM):
            row = m + tl.arange(0, RM)
            at, mask = row[:, None].to(tl.int64) * N + k, (row[:, None] < stop) & (k < N)
            v = load_values(x_ptr, fold_ptr, at, group.to(tl.int64) * N + k, mask, k < N)
            row_scale = scale_of_key(widen_key(tl.max(narrow_key(v), axis=1), v.dtype), 1.0, FMAX, RULE)
            tl.store(y_ptr + at, to_fp8(scaled(v, row_scale[:, None]), y_ptr.dtype.element_ty), mask=mask)
            store_reciprocal(row_scale_inv_ptr, row, row_scale, row < stop)


@triton.jit(do_not_specialize=["P", "N"])
def transpose_rows_kernel(
    q_ptr,
    source_ptr,
    t_ptr,
    P: tl.int32,
    N: tl.int32,
    ALIGNED: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """Gather and transpose rows of bytes, zero for negative indices.

    t[n, p] = q[source[p], n]; t is [N, P], 16 divides P.

    Without `source`, t is the transpose of q.
    """
    P = multiple_of_16(P)
    if ALIGNED:
        N = multiple_of_16(N)
    tiles_n = tl.cdiv(N, BN)
    p = ((tl.program_id(0) // tiles_n) * BM + tl.arange(0, BM))[:, None]
    c = ((tl.program_id(0) % tiles_n) * BN + tl.arange(0, BN))[None, :]
    source = tl.where(p < P, p, -1) if source_ptr is None else tl.load(source_ptr + p, mask=p < P, other=-1)
    q = tl.load(q_ptr + source.to(tl.int64) * N + c, mask=(source >= 0) & (c < N), other=0)
    tl.store(t_ptr + c.to(tl.int64) * P + p, q, mask=(p < P) & (c < N))


@triton.jit(do_not_specialize=["M", "N"])
def fill_rows_with_zeros_kernel(
    y_ptr,
    keep_ptr,
    M: tl.int32,
    N: tl.int64,
    ALIGNED: tl.constexpr,
    PARTS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """Zero rows of y [M, N] whose byte in `keep` is 0.

    Other rows are not read.

    Each of PARTS programs clears its columns of BM rows; nearly always there are none to clear.
    """
    if ALIGNED:
        N = multiple_of_16(N)
    r = ((tl.program_id(0) // PARTS).to(tl.int64) * BM + tl.arange(0, BM))[:, None]
    keep = tl.load(keep_ptr + r, mask=r < M, other=1)
    if tl.min(tl.min(keep, axis=1), axis=0) == 0:
        zero = tl.zeros((BM, BN), y_ptr.dtype.element_ty)
        for n in range((tl.program_id(0) % PARTS).to(tl.int64) * BN, N, PARTS * BN):
            c = n + tl.arange(0, BN)[None, :]
            tl.store(y_ptr + r * N + c, zero, mask=(keep == 0) & (c < N))


@plan
def group_amax(m: int, n: int, groups: int, dtype: str, *, columns: bool) -> Launch:
    """Plan int32 amax keys of row groups of x [m, n].

    [groups], or of `columns`, [groups, n].
    """
    return Launch(
        kernel=group_amax_kernel,
        grid=tile_count(m, 128) * tile_count(n, 64),
        inputs={"x_ptr": input_dtype(dtype), "group_ptr": "int32"},
        outputs={"amax_ptr": Out((groups, n) if columns else (groups,), "int32", zeroed=True)},
        scalars=matrix_sizes(m, n) | {"COUNT": groups},
        constants={"COLUMNS": columns, "ALIGNED": n % 16 == 0, "BM": 128, "BN": 64},
        num_warps=4,
    )


@plan
def group_cast(m: int, n: int, groups: int, dtype: str, fmt: str | Format, *, columns: bool) -> Launch:
    """Plan y = fp8(x * scale) of x [m, n] in groups.

    float32 scales are [groups], or of `columns`, [groups, n].
    """
    return Launch(
        kernel=group_cast_kernel,
        grid=tile_count(m, 128) * tile_count(n, 64),
        inputs={"x_ptr": input_dtype(dtype), "group_ptr": "int32", "scale_ptr": "float32"},
        outputs={"y_ptr": codes((m, n), fmt)},
        scalars=matrix_sizes(m, n) | {"COUNT": groups},
        constants={"COLUMNS": columns, "ALIGNED": n % 16 == 0, "BM": 128, "BN": 64},
        num_warps=4,
    )


@plan
def group_columns(
    m: int,
    n: int,
    p: int,
    groups: int,
    dtype: str,
    fmt: str | Format,
    policy: ScalePolicy = CANONICAL,
    *,
    rows: bool = False,
    fold: bool = False,
) -> Launch:
    """Plan column codes and scales back of groups of rows.

    Codes are [n, p] and scales [groups, n] of x [m, n].

    int32 `end_ptr` and `padded_end_ptr` [groups] are the ends of groups in x, and in the codes, where 16 divides them.
    With `rows` also row codes [m, n] and scales back [m], of `fold` those of float32(x) * float32 [groups, n].

    Raises:
        Fp8Error: 16 does not divide p, or rows are longer than `LONGEST_ROW`.
    """
    if p % ALIGNMENT or (rows and n > LONGEST_ROW):
        raise Fp8Error(
            f"Rows are transposed in multiples of {ALIGNMENT}, and cast with their columns up to a length of "
            f"{LONGEST_ROW}, got {p} and {n}. Use the reference."
        )
    sizes, row = matrix_sizes(p, n), next_power_of_2(n)
    of_columns = {"t_ptr": codes((n, p), fmt), "scale_inv_ptr": Out((groups, n), "float32")}
    of_rows = {"y_ptr": codes((m, n), fmt), "row_scale_inv_ptr": Out((m,), "float32")}
    return Launch(
        kernel=group_columns_kernel,
        # 256 x 32: tiles that the programs in flight read twice fit into the L2 cache of an H100 up to 2,000 rows a
        # group
        grid=groups * tile_count(n, 32) if m else 0,
        inputs={
            "x_ptr": input_dtype(dtype),
            "fold_ptr": "float32" if fold else None,
            "end_ptr": "int32",
            "padded_end_ptr": "int32",
        },
        outputs=of_columns | (of_rows if rows else {}),
        scalars={"P": sizes["M"], "N": sizes["N"]},
        constants=scale_constants(fmt, policy)
        | {"ALIGNED": n % 16 == 0, "BM": 256, "BN": 32, "RM": max(8192 // row, 1), "RN": row},
        num_warps=16,
    )


@plan
def transpose_rows(p: int, n: int, *, index: bool = True) -> Launch:
    """Plan bytes [n, p] of transposed rows, selected by an index.

    int32 index [p], 16 divides p; all rows without it.

    Raises:
        Fp8Error: 16 does not divide p.
    """
    if p % ALIGNMENT:
        raise Fp8Error(f"Rows are transposed in multiples of {ALIGNMENT}, got {p}. Use the reference.")
    sizes = matrix_sizes(p, n)
    return Launch(
        kernel=transpose_rows_kernel,
        grid=tile_count(p, 128) * tile_count(n, 64),
        inputs={"q_ptr": "uint8", "source_ptr": "int32" if index else None},
        outputs={"t_ptr": Out((n, p), "uint8")},
        scalars={"P": sizes["M"], "N": sizes["N"]},
        constants={"ALIGNED": n % 16 == 0, "BM": 128, "BN": 64},
        num_warps=4,
    )


@plan
def fill_rows_with_zeros(m: int, n: int, dtype: str) -> Launch:
    """Plan zeros in rows of y [m, n] whose byte is 0."""
    bm, bn = 16, 1024
    tiles = tile_count(m, bm)
    # programs for some 1000 processors: rows are many and short, or few and long
    parts = max(1, min(tile_count(n, bn), 1024 // max(tiles, 1)))
    return Launch(
        kernel=fill_rows_with_zeros_kernel,
        grid=tiles * parts if n else 0,
        inputs={"keep_ptr": "uint8"},
        outputs={"y_ptr": Out((m, n), input_dtype(dtype))},
        scalars={"M": m, "N": n},
        constants={"ALIGNED": n % 16 == 0, "PARTS": parts, "BM": bm, "BN": bn},
        num_warps=4,
        updated=("y_ptr",),
    )
