"""Grouped matmuls of FP8 codes: rows by matrices, and over groups.

A fixed number of programs loops over all tiles, group after group, and reads the ends of groups on the device. Scales
are applied to the float32 sums. Operands are read by masked loads: TMA descriptors per group would need memory
allocated at the launch, which plans do not provide. 16 divides N and K, and the rows of groups if these are contracted.
The kernels were compiled for sm_90 and run in Triton's interpreter, but never on a GPU.
"""

import triton
import triton.language as tl

from fp8_common._kernels.device import multiple_of_16
from fp8_common._kernels.launch import Launch, Out, kernel_format, matrix_sizes, plan, tile_count
from fp8_common.errors import Fp8Error
from fp8_common.formats import Format
from fp8_common.hardware import ALIGNMENT

PROGRAMS = 132
"""Number of programs: one per multiprocessor of an H100."""
SIDE, DEPTH, STAGES = 128, 128, 4
"""Side of a result tile, contracted elements per step, and steps whose loads are in flight."""


@triton.jit
def place_of_tile(tile, tiles_m, tiles_n, BAND: tl.constexpr):
    """Return the row and column of a tile.

    Tiles are numbered in bands of BAND rows, so that consecutive programs share operands.
    """
    first = tile // (BAND * tiles_n) * BAND
    size = min(tiles_m - first, BAND)
    inside = tile % (BAND * tiles_n)
    return first + inside % size, inside // size


@triton.jit(do_not_specialize=["M", "N", "K", "COUNT"])
def matmul_rows_kernel(
    a_ptr,
    b_ptr,
    a_inv_ptr,
    b_inv_ptr,
    end_ptr,
    y_ptr,
    M: tl.int32,
    N: tl.int32,
    K: tl.int32,
    COUNT: tl.int32,
    IMPRECISE: tl.constexpr,
    STAGES: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """Compute y[m] = (a[m] @ b[g].T) * a_inv[m] * b_inv[g].

    g is the group of row m; a is [M, K], b is [COUNT, N, K]. Rows after the last group are zeros: they form one more
    group with an empty sum. The tensor cores accumulate IMPRECISE terms before they are added to a float32 sum; None
    means all terms.
    """
    N, K = multiple_of_16(N), multiple_of_16(K)
    tiles_n = tl.cdiv(N, BN)
    zero = tl.program_id(0) * 0  # a tensor also in the interpreter
    group, before, start = zero, zero, zero
    end = tl.load(end_ptr)
    tiles_m = tl.cdiv(end, BM)
    # An upper bound of the number of tiles, without reading the ends: each group begins a new tile.
    for tile in tl.range(tl.program_id(0), (tl.cdiv(M, BM) + COUNT) * tiles_n, tl.num_programs(0)):
        while (group <= COUNT) & (tile >= before + tiles_m * tiles_n):
            before += tiles_m * tiles_n
            group += 1
            start = end
            end = tl.where(group < COUNT, tl.load(end_ptr + group, mask=group < COUNT, other=0), M)
            tiles_m = tl.cdiv(end - start, BM)
        if group <= COUNT:
            tile_m, tile_n = place_of_tile(tile - before, tiles_m, tiles_n, 8)
            m, n = start + tile_m * BM + tl.arange(0, BM), tile_n * BN + tl.arange(0, BN)
            k = tl.arange(0, BK)
            # Beyond the last row or column, the last one is read again, and its result is not stored.
            a_rows = a_ptr + tl.minimum(m, end - 1).to(tl.int64)[:, None] * K + k[None, :]
            b_rows = b_ptr + (group.to(tl.int64) * N + tl.minimum(n, N - 1))[:, None] * K + k[None, :]
            acc = tl.zeros((BM, BN), tl.float32)
            for at in tl.range(0, tl.where(group < COUNT, K, 0), BK, num_stages=STAGES):
                inside = (at + k < K)[None, :]
                a = tl.load(a_rows + at, mask=inside, other=0.0)
                b = tl.load(b_rows + at, mask=inside, other=0.0)
                acc = tl.dot(a, b.T, acc, max_num_imprecise_acc=IMPRECISE)
            a_inv = tl.load(a_inv_ptr + m, mask=m < tl.where(group < COUNT, end, 0), other=0.0)
            b_inv = tl.load(b_inv_ptr + group.to(tl.int64) * N + n, mask=n < tl.where(group < COUNT, N, 0), other=0.0)
            y = acc * a_inv[:, None] * b_inv[None, :]
            at_y = y_ptr + m.to(tl.int64)[:, None] * N + n[None, :]
            tl.store(at_y, y.to(y_ptr.dtype.element_ty), mask=(m < end)[:, None] & (n < N)[None, :])


@triton.jit(do_not_specialize=["P", "N", "K", "COUNT"])
def matmul_over_rows_kernel(
    a_ptr,
    b_ptr,
    a_inv_ptr,
    b_inv_ptr,
    end_ptr,
    y_ptr,
    P: tl.int32,
    N: tl.int32,
    K: tl.int32,
    COUNT: tl.int32,
    IMPRECISE: tl.constexpr,
    STAGES: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    BP: tl.constexpr,
):
    """Compute y[g] = (a[:, g] @ b[:, g].T) * a_inv[g] * b_inv[g].

    a is [N, P], b is [K, P]; g selects the columns of a group. A group without columns gives zeros. 16 divides the ends
    of groups. See `matmul_rows_kernel` for IMPRECISE.
    """
    P, N, K = multiple_of_16(P), multiple_of_16(N), multiple_of_16(K)
    tiles_n, tiles_k = tl.cdiv(N, BN), tl.cdiv(K, BK)
    for tile in tl.range(tl.program_id(0), COUNT * tiles_n * tiles_k, tl.num_programs(0)):
        group = tile // (tiles_n * tiles_k)
        tile_n, tile_k = place_of_tile(tile % (tiles_n * tiles_k), tiles_n, tiles_k, 8)
        start = multiple_of_16(tl.load(end_ptr + group - 1, mask=group > 0, other=0))
        end = multiple_of_16(tl.load(end_ptr + group))
        n, k, p = tile_n * BN + tl.arange(0, BN), tile_k * BK + tl.arange(0, BK), tl.arange(0, BP)
        a_rows = a_ptr + tl.minimum(n, N - 1).to(tl.int64)[:, None] * P + p[None, :]
        b_rows = b_ptr + tl.minimum(k, K - 1).to(tl.int64)[:, None] * P + p[None, :]
        acc = tl.zeros((BN, BK), tl.float32)
        for at in tl.range(start, end, BP, num_stages=STAGES):
            # Both are masked, because a NaN of the next group times zero is NaN.
            inside = (at + p < end)[None, :]
            a = tl.load(a_rows + at, mask=inside, other=0.0)
            b = tl.load(b_rows + at, mask=inside, other=0.0)
            acc = tl.dot(a, b.T, acc, max_num_imprecise_acc=IMPRECISE)
        # The scales of an empty group may have any value.
        a_inv = tl.load(a_inv_ptr + group.to(tl.int64) * N + n, mask=n < tl.where(start < end, N, 0), other=0.0)
        b_inv = tl.load(b_inv_ptr + group.to(tl.int64) * K + k, mask=k < tl.where(start < end, K, 0), other=0.0)
        y = acc * a_inv[:, None] * b_inv[None, :]
        at_y = y_ptr + (group.to(tl.int64) * N + n)[:, None] * K + k[None, :]
        tl.store(at_y, y.to(y_ptr.dtype.element_ty), mask=(n < N)[:, None] & (k < K)[None, :])


@plan
def matmul_rows(m: int, n: int, k: int, groups: int, fmt: str | Format, other: str | Format, *, fast: bool) -> Launch:
    """Plan a grouped matmul of rows, [m, n] in bfloat16.

    Each row of the codes [m, k] is multiplied by the matrix [n, k] of its group.

    Args:
        m: Number of rows.
        n: Rows of each matrix, a multiple of 16.
        k: Columns, a multiple of 16.
        groups: Number of groups, at least one. int32 `end_ptr` [groups] has the end of each group's rows, in
            non-decreasing order.
        fmt: Format of the rows. Their float32 scales back from FP8 are [m].
        other: Format of the matrices. Their scales back are [groups, n].
        fast: Whether the tensor cores may accumulate with fewer bits.

    Raises:
        Fp8Error: If 16 does not divide n or k.
    """
    sizes = _sizes(n, k, "N", "K") | {"M": matrix_sizes(m, n)["M"], "COUNT": groups}
    tiles = (tile_count(m, SIDE) + groups) * tile_count(n, SIDE)
    return _plan(matmul_rows_kernel, tiles if m else 0, sizes, (m, n), fmt, other, fast, ("BM", "BN", "BK"))


@plan
def matmul_over_rows(
    p: int, n: int, k: int, groups: int, fmt: str | Format, other: str | Format, *, fast: bool
) -> Launch:
    """Plan a matmul over each group, [groups, n, k] in bfloat16.

    Codes [n, p] and [k, p] are contracted over the columns of each group.

    Args:
        p: Columns of both operands, a multiple of 16. int32 `end_ptr` [groups] has the end of each group's columns,
            multiples of 16 in non-decreasing order.
        n: Rows of the first operand, a multiple of 16.
        k: Rows of the second operand, a multiple of 16.
        groups: Number of groups.
        fmt: Format of the first operand. Its float32 scales back from FP8 are [groups, n].
        other: Format of the second operand. Its scales back are [groups, k].
        fast: Whether the tensor cores may accumulate with fewer bits.

    Raises:
        Fp8Error: If 16 does not divide p, n or k.
    """
    sizes = _sizes(n, k, "N", "K") | _sizes(p, p, "P", "P") | {"COUNT": groups}
    tiles = groups * tile_count(n, SIDE) * tile_count(k, SIDE)
    return _plan(matmul_over_rows_kernel, tiles, sizes, (groups, n, k), fmt, other, fast, ("BN", "BK", "BP"))


def _sizes(first: int, second: int, *names: str) -> dict[str, int]:
    if first % ALIGNMENT or second % ALIGNMENT:
        raise Fp8Error(f"Sizes must be multiples of {ALIGNMENT}, got {first} and {second}. Use the reference.")
    return dict(zip(names, matrix_sizes(first, second).values(), strict=True))


def _plan(kernel, tiles, sizes, shape, fmt, other, fast, sides):
    formats = (kernel_format(each).dtype_name for each in (fmt, other))
    return Launch(
        kernel=kernel,
        grid=min(tiles, PROGRAMS),
        inputs=dict(zip(("a_ptr", "b_ptr"), formats, strict=True))
        | {"a_inv_ptr": "float32", "b_inv_ptr": "float32", "end_ptr": "int32"},
        outputs={"y_ptr": Out(shape, "bfloat16")},
        scalars=sizes,
        constants={"IMPRECISE": None if fast else DEPTH, "STAGES": STAGES}
        | dict(zip(sides, (SIDE, SIDE, DEPTH), strict=True)),
        num_warps=8,
    )
