"""Decides how FP8 data goes back: q * RN32(1 / scale) in float32, then rounded to the dtype of the result.

Dims: q_MN is [M, N]; a scale covers `rows` x `columns` elements and lies at [m // rows, n // columns].
"""

import triton
import triton.language as tl

from fp8_common.kernels.device import reciprocal, scale_inv_of_e8m0


@triton.jit(do_not_specialize=["M", "N", "ROWS", "COLUMNS", "STRIDE"])
def dequantize_kernel(
    q_ptr,
    scale_ptr,
    y_ptr,
    M: tl.int32,
    N: tl.int32,
    ROWS: tl.int32,
    COLUMNS: tl.int32,
    STRIDE: tl.int32,
    ALIGNED: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """Tiles are BM x BN and never cross a boundary between columns of scales: COLUMNS is a multiple of BN, or >= N."""
    if ALIGNED:
        N = tl.multiple_of(N, 16)
    tiles_n = tl.cdiv(N, BN)
    r = (tl.program_id(0) // tiles_n) * BM + tl.arange(0, BM)
    n0 = (tl.program_id(0) % tiles_n) * BN
    c = n0 + tl.arange(0, BN)[None, :]
    at, mask = r[:, None].to(tl.int64) * N + c, (r[:, None] < M) & (c < N)
    scale = tl.load(scale_ptr + (r // ROWS).to(tl.int64) * STRIDE + n0 // COLUMNS, mask=r < M, other=1.0)
    value = tl.load(q_ptr + at, mask=mask, other=0.0).to(tl.float32) * reciprocal(scale)[:, None]
    tl.store(y_ptr + at, value.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["M", "N"])
def dequantize_mx_kernel(
    q_ptr,
    code_ptr,
    y_ptr,
    M: tl.int32,
    N: tl.int32,
    ALIGNED: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """The same for MX data, whose E8M0 codes are uint8 [M, ceil(N / 32)]; exact in float32."""
    if ALIGNED:
        N = tl.multiple_of(N, 16)
    BLOCKS: tl.constexpr = BN // 32
    tiles_n, columns = tl.cdiv(N, BN), tl.cdiv(N, 32)
    r = (tl.program_id(0) // tiles_n) * BM + tl.arange(0, BM)[:, None]
    tile = tl.program_id(0) % tiles_n
    c = tile * BN + tl.arange(0, BN)[None, :]
    at, mask = r.to(tl.int64) * N + c, (r < M) & (c < N)
    b = tile * BLOCKS + tl.arange(0, BLOCKS)[None, :]
    code = tl.load(code_ptr + r.to(tl.int64) * columns + b, mask=(r < M) & (b < columns), other=127)
    scale_inv = tl.reshape(scale_inv_of_e8m0(code.to(tl.int32)), (BM * BLOCKS, 1))
    q = tl.reshape(tl.load(q_ptr + at, mask=mask, other=0.0), (BM * BLOCKS, 32))
    value = tl.reshape(q.to(tl.float32) * scale_inv, (BM, BN))
    tl.store(y_ptr + at, value.to(y_ptr.dtype.element_ty), mask=mask)
