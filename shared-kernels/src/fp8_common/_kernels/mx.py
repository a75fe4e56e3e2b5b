"""The kernel that quantizes to OCP MX: one E8M0 code for every 32 consecutive elements of a row."""

import triton
import triton.language as tl

from fp8_common._kernels.device import e8m0_of_key, multiple_of_16, narrow_key, scale_of_e8m0, scaled, to_fp8, widen_key


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
    """Make code[m, b] from max |x[m, 32b : 32b + 32]| and y = fp8(x * 2^(127 - code)); codes are uint8, row-major."""
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
