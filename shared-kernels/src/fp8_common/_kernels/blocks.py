"""Kernels with one scale per block: 1x128, 128x128, and OCP MX.

MX blocks are 32 consecutive values of a row with one E8M0 code. Blocks at the edges may be partial. Dims: x_MN is
[M, N]; scales are [M, ceil(N / 128)] or [ceil(M / 128), ceil(N / 128)], row-major.
"""

import triton
import triton.language as tl

from fp8_common._kernels.device import (
    e8m0_of_key,
    multiple_of_16,
    narrow_key,
    scale_of_e8m0,
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
    plan,
    rounding_constants,
    scale_constants,
    tile_count,
)
from fp8_common._kernels.tensor import max_narrow_key, rows_of_four, store_columns, store_with_transpose
from fp8_common.errors import Fp8Error
from fp8_common.formats import Format
from fp8_common.policy import CANONICAL, MxMode, ScalePolicy


@triton.jit(do_not_specialize=["M", "N"])
def block_1x128_kernel(
    x_ptr,
    y_ptr,
    scale_ptr,
    scale_inv_ptr,
    M: tl.int32,
    N: tl.int32,
    FMAX: tl.constexpr,
    RULE: tl.constexpr,
    ALIGNED: tl.constexpr,
    BM: tl.constexpr,
):
    """Cast x by 1x128 blocks, BM of them per program."""
    if ALIGNED:
        N = multiple_of_16(N)
    # Program order runs along the rows of scales, which lie next to each other in memory.
    columns = tl.cdiv(N, 128)
    block = tl.program_id(0) % columns
    r = (tl.program_id(0) // columns) * BM + tl.arange(0, BM)
    c = block * 128 + tl.arange(0, 128)[None, :]
    at, mask = r[:, None].to(tl.int64) * N + c, (r[:, None] < M) & (c < N)
    # Zeros beyond the edge do not change an amax.
    x = tl.load(x_ptr + at, mask=mask, other=0.0)
    key = widen_key(tl.max(narrow_key(x), axis=1), x_ptr.dtype.element_ty)
    scale = scale_of_key(key, 1.0, FMAX, RULE)
    tl.store(y_ptr + at, to_fp8(scaled(x, scale[:, None]), y_ptr.dtype.element_ty), mask=mask)
    place = r.to(tl.int64) * columns + block
    tl.store(scale_ptr + place, scale, mask=r < M)
    store_reciprocal(scale_inv_ptr, place, scale, r < M)


@triton.jit(do_not_specialize=["M", "N"])
def block_128x128_kernel(
    x_ptr,
    y_ptr,
    scale_ptr,
    scale_inv_ptr,
    M: tl.int32,
    N: tl.int32,
    FMAX: tl.constexpr,
    RULE: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Cast x by 128x128 blocks; a program casts one block."""
    if ALIGNED:
        M, N = multiple_of_16(M), multiple_of_16(N)
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    columns = tl.cdiv(N, 128)
    m0, n0 = (tl.program_id(0) // columns) * 128, (tl.program_id(0) % columns) * 128
    r, c = m0 + tl.arange(0, 128)[:, None], n0 + tl.arange(0, 128)[None, :]
    at, mask = r.to(tl.int64) * N + c, (r < M) & (c < N)
    x = tl.load(x_ptr + at, mask=mask, other=0.0)
    scale = scale_of_key(widen_key(max_narrow_key(x), DTYPE), 1.0, FMAX, RULE)
    tl.store(y_ptr + at, to_fp8(scaled(x, scale), y_ptr.dtype.element_ty), mask=mask)
    # Programs are numbered like the blocks.
    tl.store(scale_ptr + tl.program_id(0), scale)
    store_reciprocal(scale_inv_ptr, tl.program_id(0), scale, None)


@triton.jit
def cast_row_blocks(x, y_ptr, scale_inv_ptr, r, block, at, mask, M, FMAX: tl.constexpr, RULE: tl.constexpr):
    """Cast rows r of a column of 1x128 blocks, and store them.

    Also stores the scales back from FP8, in `scale_inv` [ceil(N / 128), M].
    """
    scale = scale_of_key(widen_key(tl.max(narrow_key(x), axis=1), x.dtype), 1.0, FMAX, RULE)
    tl.store(y_ptr + at, to_fp8(scaled(x, scale[:, None]), y_ptr.dtype.element_ty), mask=mask)
    store_reciprocal(scale_inv_ptr, block.to(tl.int64) * M + r, scale, r < M)


@triton.jit(do_not_specialize=["M", "N"])
def block_both_kernel(
    x_ptr,
    y_ptr,
    yt_ptr,
    scale_inv_ptr,
    turned_inv_ptr,
    M: tl.int32,
    N: tl.int32,
    FMAX: tl.constexpr,
    RULE: tl.constexpr,
    ALIGNED: tl.constexpr,
    SQUARE: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """Cast x and its transpose by blocks, reading x once.

    y has the codes of x, yt those of the transpose. Blocks are 1x128, or 128x128 if SQUARE; M % 4 == 0. The scales back
    from FP8 are row-major for 128x128 blocks, and column-major for 1x128 blocks.
    """
    if ALIGNED:
        M, N = multiple_of_16(M), multiple_of_16(N)
    F8: tl.constexpr = y_ptr.dtype.element_ty
    tiles_m, tiles_n = tl.cdiv(M, BM), tl.cdiv(N, BN)
    bm, bn = tl.program_id(0) // tiles_n, tl.program_id(0) % tiles_n
    m0, n0 = bm * BM, bn * BN
    at, mask = rows_of_four(m0, n0, M, N, BM, BN)
    x0 = tl.load(x_ptr + at, mask=mask, other=0.0)
    x1 = tl.load(x_ptr + at + N, mask=mask, other=0.0)
    x2 = tl.load(x_ptr + at + 2 * N, mask=mask, other=0.0)
    x3 = tl.load(x_ptr + at + 3 * N, mask=mask, other=0.0)
    key = tl.maximum(tl.maximum(narrow_key(x0), narrow_key(x1)), tl.maximum(narrow_key(x2), narrow_key(x3)))
    # converted to the narrow type again, as in `max_narrow_key`
    top = tl.max(key, axis=0).to(key.dtype)
    if SQUARE:
        scale = scale_of_key(widen_key(tl.max(top, axis=0), x0.dtype), 1.0, FMAX, RULE)
        store_with_transpose(y_ptr, yt_ptr, x0, x1, x2, x3, at, mask, scale, m0, n0, M, N, BM, BN)
        store_reciprocal(scale_inv_ptr, tl.program_id(0), scale, None)
        store_reciprocal(turned_inv_ptr, bn * tiles_m + bm, scale, None)
    else:
        r, c = m0 + 4 * tl.arange(0, BM // 4), n0 + tl.arange(0, BN)
        cast_row_blocks(x0, y_ptr, scale_inv_ptr, r, bn, at, mask, M, FMAX, RULE)
        cast_row_blocks(x1, y_ptr, scale_inv_ptr, r + 1, bn, at + N, mask, M, FMAX, RULE)
        cast_row_blocks(x2, y_ptr, scale_inv_ptr, r + 2, bn, at + 2 * N, mask, M, FMAX, RULE)
        cast_row_blocks(x3, y_ptr, scale_inv_ptr, r + 3, bn, at + 3 * N, mask, M, FMAX, RULE)
        scale = scale_of_key(widen_key(top, x0.dtype), 1.0, FMAX, RULE)
        s = scale[None, :]
        _, _, _, _, words = to_fp8_rows(scaled(x0, s), scaled(x1, s), scaled(x2, s), scaled(x3, s), F8)
        store_columns(yt_ptr, words, m0, n0, M, N, BM, BN)
        store_reciprocal(turned_inv_ptr, bm.to(tl.int64) * N + c, scale, c < N)


@triton.jit(do_not_specialize=["M", "N"])
def mx_kernel(
    x_ptr,
    y_ptr,
    code_ptr,
    M: tl.int32,
    N: tl.int32,
    MODE: tl.constexpr,
    MAX_KEY: tl.constexpr,
    MANTISSA_BITS: tl.constexpr,
    ALIGNED: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """Cast x to MX, with an E8M0 code for 32 values.

    code[m, b] is computed from max |x[m, 32b : 32b + 32]|, and y = fp8(x * 2^(127 - code)). Codes are uint8
    [M, ceil(N / 32)], row-major.
    """
    if ALIGNED:
        N = multiple_of_16(N)
    BLOCKS: tl.constexpr = BN // 32
    tiles_n = tl.cdiv(N, BN)
    r = (tl.program_id(0) // tiles_n) * BM + tl.arange(0, BM)[:, None]
    tile = tl.program_id(0) % tiles_n
    c = tile * BN + tl.arange(0, BN)[None, :]
    at, mask = r.to(tl.int64) * N + c, (r < M) & (c < N)
    # The tile is seen as rows of 32 values, one MX block each: the reduction stays inside a row, and scales broadcast.
    # Elements beyond the edge are zeros, which do not change an amax.
    x = tl.reshape(tl.load(x_ptr + at, mask=mask, other=0.0), (BM * BLOCKS, 32))
    key = widen_key(tl.max(narrow_key(x), axis=1), x_ptr.dtype.element_ty)
    code = e8m0_of_key(key, MODE, MAX_KEY, MANTISSA_BITS)
    q = to_fp8(scaled(x, scale_of_e8m0(code)[:, None]), y_ptr.dtype.element_ty)
    tl.store(y_ptr + at, tl.reshape(q, (BM, BN)), mask=mask)
    columns = tl.cdiv(N, 32)
    b = tile * BLOCKS + tl.arange(0, BLOCKS)[None, :]
    codes = tl.reshape(code, (BM, BLOCKS)).to(tl.uint8)
    tl.store(code_ptr + r.to(tl.int64) * columns + b, codes, mask=(r < M) & (b < columns))


@plan
def blockwise(
    m: int,
    n: int,
    dtype: str,
    fmt: str | Format,
    rows: int,
    policy: ScalePolicy = CANONICAL,
    *,
    inverse: bool = True,
) -> Launch:
    """Plan the cast of x [m, n] by `rows` x 128 blocks.

    The outputs are codes and float32 scales [ceil(m / rows), ceil(n / 128)]; with `inverse` also the scales back from
    FP8.

    Raises:
        Fp8Error: If `rows` is neither 1 nor 128.
    """
    if rows not in (1, 128):
        raise Fp8Error(f"There are kernels for 1x128 and 128x128 blocks, got {rows}x128. Use the reference.")
    if rows == 1:
        # 64 elements per thread: with fewer, computing the row's scale in every thread is too much of the work.
        kernel, aligned, bm, warps = block_1x128_kernel, n % 16 == 0, 64, 4
    else:
        kernel, aligned, bm, warps = block_128x128_kernel, m % 16 == n % 16 == 0, 128, 8
    scales = ("scale_ptr", "scale_inv_ptr") if inverse else ("scale_ptr",)
    grid = tile_count(m, rows), tile_count(n, 128)
    return Launch(
        kernel=kernel,
        grid=tile_count(m, bm) * tile_count(n, 128),
        inputs={"x_ptr": input_dtype(dtype)},
        outputs={"y_ptr": codes((m, n), fmt)} | dict.fromkeys(scales, Out(grid, "float32")),
        scalars=matrix_sizes(m, n),
        constants=scale_constants(fmt, policy) | {"ALIGNED": aligned} | ({"BM": bm} if rows == 1 else {}),
        num_warps=warps,
    )


@plan
def block_both(
    m: int, n: int, dtype: str, fmt: str | Format, policy: ScalePolicy = CANONICAL, *, square: bool = False
) -> Launch:
    """Plan casts of x [m, n] and its transpose by blocks.

    The kernel reads x once; m % 4 == 0. Blocks are 1x128, or 128x128 if `square`. The outputs are codes [m, n] and
    [n, m], and the float32 scales back from FP8 of both. For square blocks these are [ceil(m / 128), ceil(n / 128)] and
    its transpose; for 1x128 blocks [ceil(n / 128), m] and [ceil(m / 128), n], as cuBLAS reads them.
    """
    blocks_m, blocks_n = tile_count(m, 128), tile_count(n, 128)
    shapes = ((blocks_m, blocks_n), (blocks_n, blocks_m)) if square else ((blocks_n, m), (blocks_m, n))
    scales = zip(("scale_inv_ptr", "turned_inv_ptr"), shapes, strict=True)
    return Launch(
        kernel=block_both_kernel,
        grid=blocks_m * blocks_n,
        inputs={"x_ptr": input_dtype(dtype)},
        outputs={"y_ptr": codes((m, n), fmt), "yt_ptr": codes((n, m), fmt)}
        | {name: Out(shape, "float32") for name, shape in scales},
        scalars=matrix_sizes(m, n),
        constants=scale_constants(fmt, policy)
        | {"ALIGNED": m % 16 == n % 16 == 0, "SQUARE": square, "BM": 128, "BN": 128},
        num_warps=8,  # without register spills on compute capability 9.0
    )


@plan
def mx(m: int, n: int, dtype: str, fmt: str | Format, mode: MxMode = "rceil") -> Launch:
    """Plan the cast of x [m, n] to OCP MX.

    The outputs are FP8 codes [m, n] and E8M0 codes, uint8 [m, ceil(n / 32)].
    """
    max_key, _, mantissa_bits = rounding_constants(fmt)
    return Launch(
        kernel=mx_kernel,
        grid=tile_count(m, 32) * tile_count(n, 128),
        inputs={"x_ptr": input_dtype(dtype)},
        outputs={"y_ptr": codes((m, n), fmt), "code_ptr": Out((m, tile_count(n, 32)), "uint8")},
        scalars=matrix_sizes(m, n),
        constants={
            "MODE": mode,
            "MAX_KEY": max_key,
            "MANTISSA_BITS": mantissa_bits,
            "ALIGNED": n % 16 == 0,
            "BM": 32,
            "BN": 128,
        },
        num_warps=4,
    )
