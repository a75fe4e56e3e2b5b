"""Kernels that quantize with one scale per 1x128 or 128x128 block. Blocks at the edges may be partial.

Dims: x_MN is [M, N]; scales are [M, ceil(N / 128)] or [ceil(M / 128), ceil(N / 128)], row-major.
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
from fp8_common._kernels.transpose import load_rows, max_narrow_key, store_with_transpose


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
    """A scale for every 128 consecutive elements of a row; a program handles one such column of BM rows."""
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
    yt_ptr,
    scale_ptr,
    scale_inv_ptr,
    M: tl.int32,
    N: tl.int32,
    FMAX: tl.constexpr,
    RULE: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """A scale for every 128x128 block; with `yt`, its transpose too, which needs M % 4 == 0."""
    if ALIGNED:
        M, N = multiple_of_16(M), multiple_of_16(N)
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    columns = tl.cdiv(N, 128)
    m0, n0 = (tl.program_id(0) // columns) * 128, (tl.program_id(0) % columns) * 128
    if yt_ptr is not None:
        # Four interleaved tiles of 32 rows: what `store_with_transpose` packs into words.
        x0, at, mask = load_rows(x_ptr, m0, n0, M, N, 128, 128, 0)
        x1 = tl.load(x_ptr + at + N, mask=mask, other=0.0)
        x2 = tl.load(x_ptr + at + 2 * N, mask=mask, other=0.0)
        x3 = tl.load(x_ptr + at + 3 * N, mask=mask, other=0.0)
        keys = tl.maximum(tl.maximum(narrow_key(x0), narrow_key(x1)), tl.maximum(narrow_key(x2), narrow_key(x3)))
        # tl.max promotes int16 to int32; narrowed between the two reductions, so that the second is 16 bits wide too.
        key = widen_key(tl.max(tl.max(keys, axis=1).to(keys.dtype), axis=0), DTYPE)
        scale = scale_of_key(key, 1.0, FMAX, RULE)
        store_with_transpose(y_ptr, yt_ptr, x0, x1, x2, x3, at, mask, scale, m0, n0, M, N, 128, 128)
    else:
        r, c = m0 + tl.arange(0, 128)[:, None], n0 + tl.arange(0, 128)[None, :]
        at, mask = r.to(tl.int64) * N + c, (r < M) & (c < N)
        x = tl.load(x_ptr + at, mask=mask, other=0.0)
        scale = scale_of_key(widen_key(max_narrow_key(x), DTYPE), 1.0, FMAX, RULE)
        tl.store(y_ptr + at, to_fp8(scaled(x, scale), y_ptr.dtype.element_ty), mask=mask)
    # Programs are numbered like the blocks.
    tl.store(scale_ptr + tl.program_id(0), scale)
    store_reciprocal(scale_inv_ptr, tl.program_id(0), scale, None)
