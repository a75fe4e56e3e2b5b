"""The kernel that casts a matrix and writes both the FP8 data and its transpose from one read.

Hopper multiplies FP8 matrices in one layout only (both operands contiguous along the contracted dimension), so weights
and gradients are needed both ways. Four adjacent rows are converted together and packed into words down the columns:
the transpose moves words, not bytes, through shared memory. Dims: x_MN is [M, N]; yt_NM is [N, M].
"""

import triton
import triton.language as tl

from fp8_common._kernels.cast import tensor_scale
from fp8_common._kernels.device import multiple_of_16, narrow_key, scaled, to_fp8, to_fp8_rows, widen_key


@triton.jit
def max_narrow_key(x):
    """Narrow key of max |x| over a 2-D tile."""
    # tl.max promotes int16 to int32; narrowed in between, so that the second reduction is 16 bits wide too.
    return tl.max(tl.max(narrow_key(x), axis=1).to(narrow_key(x).dtype), axis=0)


@triton.jit
def load_rows(x_ptr, m0, n0, M, N, BM: tl.constexpr, BN: tl.constexpr, ROW: tl.constexpr):
    """Rows m0 + 4j + ROW, columns n0.. of x as [BM / 4, BN], with offsets and mask."""
    r = m0 + ROW + 4 * tl.arange(0, BM // 4)[:, None]
    c = n0 + tl.arange(0, BN)[None, :]
    at, mask = r.to(tl.int64) * N + c, (r < M) & (c < N)
    return tl.load(x_ptr + at, mask=mask, other=0.0), at, mask


@triton.jit
def store_columns(yt_ptr, column, m0, n0, M, N, BM: tl.constexpr, BN: tl.constexpr):
    """Store int32 words [BM / 4, BN] of four vertical neighbours each to the transpose; needs M % 4 == 0."""
    # Four horizontal neighbours of the transpose are one int32 store. The address is a multiple of 4 because M is.
    words = yt_ptr.to(tl.pointer_type(tl.int32))
    c = n0 + tl.arange(0, BN)[:, None]
    r = m0 // 4 + tl.arange(0, BM // 4)[None, :]
    tl.store(words + c.to(tl.int64) * (M // 4) + r, tl.trans(column), mask=(c < N) & (r < M // 4))


@triton.jit
def store_with_transpose(
    y_ptr, yt_ptr, x0, x1, x2, x3, at, mask, scale, m0, n0, M, N, BM: tl.constexpr, BN: tl.constexpr
):
    """Cast four tiles of interleaved rows and store them both ways; needs M % 4 == 0."""
    F8: tl.constexpr = y_ptr.dtype.element_ty
    q0, q1, q2, q3, column = to_fp8_rows(scaled(x0, scale), scaled(x1, scale), scaled(x2, scale), scaled(x3, scale), F8)
    tl.store(y_ptr + at, q0, mask=mask)
    tl.store(y_ptr + at + N, q1, mask=mask)
    tl.store(y_ptr + at + 2 * N, q2, mask=mask)
    tl.store(y_ptr + at + 3 * N, q3, mask=mask)
    store_columns(yt_ptr, column, m0, n0, M, N, BM, BN)


@triton.jit(do_not_specialize=["M", "N"])
def cast_transpose_kernel(
    x_ptr,
    scale_ptr,
    y_ptr,
    yt_ptr,
    amax_ptr,
    scale_out_ptr,
    scale_inv_ptr,
    M: tl.int32,
    N: tl.int32,
    FMAX: tl.constexpr,
    RULE: tl.constexpr,
    ALIGNED: tl.constexpr,
    PACKED: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """Compute y = fp8(x * scale) and yt = y^T; scale and amax as in `cast_kernel`. PACKED needs M % 4 == 0."""
    if ALIGNED:
        M, N = multiple_of_16(M), multiple_of_16(N)
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    scale = tensor_scale(scale_ptr, scale_out_ptr, scale_inv_ptr, FMAX, RULE)
    # Backwards after a pass for the amax, as in `cast_kernel`.
    tile = tl.program_id(0) if RULE is None else tl.num_programs(0) - 1 - tl.program_id(0)
    tiles_n = tl.cdiv(N, BN)
    m0, n0 = (tile // tiles_n) * BM, (tile % tiles_n) * BN
    if PACKED:
        x0, at, mask = load_rows(x_ptr, m0, n0, M, N, BM, BN, 0)
        x1 = tl.load(x_ptr + at + N, mask=mask, other=0.0)
        x2 = tl.load(x_ptr + at + 2 * N, mask=mask, other=0.0)
        x3 = tl.load(x_ptr + at + 3 * N, mask=mask, other=0.0)
        store_with_transpose(y_ptr, yt_ptr, x0, x1, x2, x3, at, mask, scale, m0, n0, M, N, BM, BN)
        if amax_ptr is not None:
            key = tl.maximum(tl.maximum(narrow_key(x0), narrow_key(x1)), tl.maximum(narrow_key(x2), narrow_key(x3)))
            top = tl.max(tl.max(key, axis=1).to(key.dtype), axis=0)
            tl.atomic_max(amax_ptr, widen_key(top, DTYPE), sem="relaxed")
    else:
        r, c = m0 + tl.arange(0, BM)[:, None], n0 + tl.arange(0, BN)[None, :]
        at, mask = r.to(tl.int64) * N + c, (r < M) & (c < N)
        x = tl.load(x_ptr + at, mask=mask, other=0.0)
        q = to_fp8(scaled(x, scale), y_ptr.dtype.element_ty)
        tl.store(y_ptr + at, q, mask=mask)
        # Stored byte by byte: where 4 does not divide M, rows of the transpose do not start at words.
        tl.store(yt_ptr + c.to(tl.int64) * M + r, q, mask=mask)
        if amax_ptr is not None:
            tl.atomic_max(amax_ptr, widen_key(max_narrow_key(x), DTYPE), sem="relaxed")
