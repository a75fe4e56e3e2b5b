"""Kernels that dequantize: q * RN32(1 / scale) in float32, rounded to the dtype of the result.

Dims: q_MN is [M, N]; a scale covers `rows` x `columns` elements and lies at [m // rows, n // columns].
"""

import triton
import triton.language as tl

from fp8_common._kernels.device import multiple_of_16, reciprocal, scale_inv_of_e8m0


@triton.jit(do_not_specialize=["M", "N"])
def dequantize_kernel(
    q_ptr,
    scale_ptr,
    y_ptr,
    M: tl.int32,
    N: tl.int32,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ALIGNED: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """ROWS is 0 where a scale covers all rows; COLUMNS is 0 where it covers the whole row, else it equals BN."""
    if ALIGNED:
        N = multiple_of_16(N)
    tiles_n = tl.cdiv(N, BN)
    tile = tl.program_id(0) % tiles_n
    r = (tl.program_id(0) // tiles_n) * BM + tl.arange(0, BM)[:, None]
    c = tile * BN + tl.arange(0, BN)[None, :]
    at, mask = r.to(tl.int64) * N + c, (r < M) & (c < N)
    # Tiles are as wide as a block (BN == COLUMNS), so the number of a tile is the column of its scale.
    column = 0 if COLUMNS == 0 else tile
    stride = 1 if COLUMNS == 0 else tiles_n
    # The rounded reciprocal is part of the definition: q / scale would differ in the last bit.
    if ROWS == 0:
        scale_inv = reciprocal(tl.load(scale_ptr + column))
    else:
        scale_inv = reciprocal(tl.load(scale_ptr + (r // ROWS).to(tl.int64) * stride + column, mask=r < M, other=1.0))
    value = tl.load(q_ptr + at, mask=mask, other=0.0).to(tl.float32) * scale_inv
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
        N = multiple_of_16(N)
    # The tile is seen as rows of 32 values, one MX block each, so that the scales broadcast.
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
