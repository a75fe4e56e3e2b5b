"""Kernels that dequantize FP8 codes.

Values are q * scale_inv in float32, rounded to the dtype of the output. Dims: q_MN is [M, N]. A scale covers `rows` x
`columns` elements: element [m, n] has the scale [m // rows, n // columns].
"""

import triton
import triton.language as tl

from fp8_common._kernels.device import multiple_of_16, scale_inv_of_e8m0
from fp8_common._kernels.launch import Launch, Out, input_dtype, kernel_format, matrix_sizes, plan, tile_count
from fp8_common.errors import Fp8Error
from fp8_common.formats import Format


@triton.jit(do_not_specialize=["M", "N"])
def dequantize_kernel(
    q_ptr,
    scale_inv_ptr,
    y_ptr,
    M: tl.int32,
    N: tl.int32,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ALIGNED: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """Dequantize q with one scale per block of ROWS x COLUMNS.

    ROWS is 0 if a scale covers all rows; COLUMNS is 0 if a scale covers all columns, else it equals BN.
    """
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
    if ROWS == 0:
        scale_inv = tl.load(scale_inv_ptr + column)
    else:
        scale_inv = tl.load(scale_inv_ptr + (r // ROWS).to(tl.int64) * stride + column, mask=r < M, other=1.0)
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
    """Dequantize MX data; the multiplication in float32 is exact.

    E8M0 codes are uint8 [M, ceil(N / 32)].
    """
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


@plan
def dequantize(m: int, n: int, fmt: str | Format, dtype: str, block: tuple[int, int]) -> Launch:
    """Plan the values [m, n] of codes with one scale per block.

    `block` is (rows, columns); `scale_inv_ptr` has a float32 scale back from FP8 for each block, row-major.

    Raises:
        Fp8Error: If scales cover neither whole rows nor 128 columns.
    """
    # 0 means the whole side: the kernel then needs no index into the scales along it.
    rows = 0 if block[0] >= m else block[0]
    columns = 0 if block[1] >= n else block[1]
    if columns not in (0, 128):
        raise Fp8Error(f"dequantize needs scales for whole rows or for 128 columns, got {block}. Use the reference.")
    return Launch(
        kernel=dequantize_kernel,
        grid=tile_count(m, 32) * tile_count(n, 128),
        inputs={"q_ptr": kernel_format(fmt).dtype_name, "scale_inv_ptr": "float32"},
        outputs={"y_ptr": Out((m, n), input_dtype(dtype))},
        scalars=matrix_sizes(m, n),
        constants={"ROWS": rows, "COLUMNS": columns, "ALIGNED": n % 16 == 0, "BM": 32, "BN": 128},
        num_warps=4,
    )


@plan
def dequantize_mx(m: int, n: int, fmt: str | Format, dtype: str) -> Launch:
    """Plan the values of MX data [m, n].

    Its E8M0 codes `code_ptr` are uint8 [m, ceil(n / 32)].
    """
    return Launch(
        kernel=dequantize_mx_kernel,
        grid=tile_count(m, 16) * tile_count(n, 128),
        inputs={"q_ptr": kernel_format(fmt).dtype_name, "code_ptr": "uint8"},
        outputs={"y_ptr": Out((m, n), input_dtype(dtype))},
        scalars=matrix_sizes(m, n),
        constants={"ALIGNED": n % 16 == 0, "BM": 16, "BN": 128},
        num_warps=4,
    )
