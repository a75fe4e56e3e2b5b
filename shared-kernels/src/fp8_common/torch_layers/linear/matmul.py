"""The matmul of two FP8 matrices, on each kind of device.

On devices with FP8 tensor cores, `torch.nn.functional.scaled_mm` multiplies codes. This includes scales of 1x128 and
128x128 blocks, which cuBLAS supports on Hopper, and MX scales, which it supports on Blackwell.

Other devices emulate. Every FP8 value is exact in bfloat16 and float32, so the codes are decoded and multiplied in
bfloat16 for bfloat16 results (not on CPUs without bfloat16 units), else in float32. On CPUs this is several times
faster than the scaled matmul of torch. The operands are the same numbers; only the order of accumulation and the
rounding of sums differ.

Operands with block scales that the device does not support are dequantized and multiplied in float32 (MX: in bfloat16
or float32, as above). Of all GPUs, only Hopper was tested.
"""

import logging
from functools import cache
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F

from fp8_common._machine import parse_version
from fp8_common.errors import Fp8Error, Fp8UnsupportedError
from fp8_common.hardware import (
    ALIGNMENT,
    GroupedMatmuls,
    RowsLibrary,
    multiplies_blocks,
    multiplies_mx,
    multiplies_rows,
)
from fp8_common.recipe import BLOCKS
from fp8_common.torch import casts, decoding
from fp8_common.torch._operators import operator
from fp8_common.torch.blocks import split_blocks
from fp8_common.torch.compat import (
    ROWS_INTO_ALL_DTYPES,
    Scaling,
    assume_constant_result,
    multiplies_bfloat16,
    scaled_mm,
)
from fp8_common.torch.numerics import in_dtype
from fp8_common.torch.quantized import Quantized
from fp8_common.torch_layers.linear.group_offsets import transposed_rows

logger = logging.getLogger(__name__)

BLOCK_1X128, BLOCK_128X128 = BLOCKS["blockwise_1x128"], BLOCKS["blockwise_128x128"]
# The stride between rows of 128x128 scales is their number in some versions of torch, and that number rounded up to a
# multiple of 4 in others. Both agree if 4 divides the number, hence 512.
_MULTIPLE_OF_PAIR = {
    (BLOCK_1X128, BLOCK_128X128): 512,
    (BLOCK_128X128, BLOCK_1X128): 512,
    (BLOCK_1X128, BLOCK_1X128): 128,
    (casts.MX_BLOCK, casts.MX_BLOCK): 32,
}
"""Required divisor of the contracted dimension, by the blocks of both operands; other pairs are not supported."""
_FIRST_WITH_FP8 = (8, 9)
"""The first compute capability with FP8 tensor cores."""


class MatmulOptions(NamedTuple):
    """Settings of one matmul.

    Attributes:
        out_dtype: float32, bfloat16 or float16.
        emulate: Whether to decode codes and multiply in high precision, instead of using FP8 hardware.
        use_fast_accum: Whether the hardware may accumulate with fewer bits.
        pad_inner: Whether to pad the contracted dimension with zeros to a multiple of 16 for the hardware. Without
            padding, other sizes raise an error there.
        pad_outer: The same for the rows of the second operand.
        decoded: dtype of decoded codes in emulation; None computes it with `decoded_dtype`.
        rows: Library for row scales, from `rows_library`: "cublas" supports both formats, "cutlass" only E4M3 as the
            second operand, and "" means that codes are decoded.
        grouped: Implementation of grouped matmuls, as in `GemmConfig`.
    """

    out_dtype: torch.dtype
    emulate: bool
    use_fast_accum: bool = False
    pad_inner: bool = False
    pad_outer: bool = False
    decoded: torch.dtype | None = None
    rows: RowsLibrary = "cublas"
    grouped: GroupedMatmuls = "table"


def should_emulate(device: torch.device, emulate: Literal["auto"] | bool) -> bool:
    """Return whether to emulate matmuls on `device`.

    Args:
        device: Device of the operands.
        emulate: True always emulates, False never, and "auto" if the device has no FP8 matmuls.

    Raises:
        Fp8UnsupportedError: If `emulate` is False and the device has no FP8 matmuls.
    """
    if emulate is True:
        return True
    supported = multiplies_fp8(device)
    if emulate is False and not supported:
        raise Fp8UnsupportedError(
            f"{device} has no FP8 matmuls: they need an NVIDIA GPU of compute capability 8.9 or higher. "
            'Use emulate="auto" or emulate=True to compute the same numbers in higher precision.'
        )
    return not supported


# Under torch.compile the result is a constant of the graph; Dynamo would otherwise trace into the capability query.
@assume_constant_result
def device_capability(device: torch.device) -> tuple[int, int]:
    """Return an NVIDIA GPU's compute capability, else (0, 0)."""
    return _look_up(device)


# A constant as well, because torch 2.11 fails to trace comparisons of tuples on Python 3.12.
@assume_constant_result
def multiplies_fp8(device: torch.device) -> bool:
    """Return whether `device` has FP8 tensor cores."""
    return device_capability(device) >= _FIRST_WITH_FP8


@assume_constant_result
def rows_library(device: torch.device) -> RowsLibrary:
    """Return the library that multiplies with row scales on `device`.

    "" for GPUs on which torch supports no row scales; "cublas" also for other devices, which emulate anyway.
    """
    capability = device_capability(device)
    return multiplies_rows(capability, parse_version(torch.version.cuda)) if capability > (0, 0) else "cublas"


# Cached, so that it warns once for each device. A separate function, as `assume_constant_result` requires a plain one.
@cache
def _look_up(device: torch.device) -> tuple[int, int]:
    if device.type != "cuda":
        return 0, 0
    # On ROCm, gfx90a reports 9.0 and has no FP8 units; gfx942 has units for formats that no built-in recipe uses.
    capability: tuple[int, int] = (0, 0) if torch.version.hip else torch.cuda.get_device_capability(device)
    if capability < _FIRST_WITH_FP8:
        logger.warning("FP8 matmuls are emulated in higher precision on %s.", device)
    return capability


@assume_constant_result
def multiplies_scaled_blocks(device: torch.device, mx: bool) -> bool:
    """Return whether `device` multiplies with MX scales, or with float32 block scales.

    `mx` selects MX scales.
    """
    version, multiplies = torch.version.cuda, multiplies_mx if mx else multiplies_blocks
    return version is not None and multiplies(device_capability(device), parse_version(version))


def matmul(a: Quantized, b: Quantized, options: MatmulOptions) -> torch.Tensor:
    """Return a @ b.T with scales applied.

    Args:
        a: [M, K].
        b: [N, K].
        options: Settings of the matmul.

    Returns:
        [M, N] in `options.out_dtype`.

    Raises:
        Fp8Error: If the hardware requires other sizes, and `options` do not allow padding to them.
    """
    if a.block or b.block:
        native = not options.emulate and applies_blocks(a, b, options.out_dtype)
        return (_matmul_blocks if native else _matmul_dequantized)(a, b, options.out_dtype)
    if options.emulate:
        return _matmul_decoded(a, b, options)
    # CUTLASS requires E4M3 as the second operand.
    supports_rows = options.rows == "cublas" or (options.rows == "cutlass" and b.fmt.name == "e4m3")
    if (a.scale_inv.ndim or b.scale_inv.ndim) and not supports_rows:
        return _matmul_decoded(a, b, options)
    return _matmul_scaled(a, b, options)


def _matmul_decoded(a: Quantized, b: Quantized, options: MatmulOptions) -> torch.Tensor:
    exact = options.decoded or decoded_dtype(a.codes.device, options.out_dtype)
    # Scales are applied afterwards, in float32: decoded values times scales would be rounded before the matmul. On CPUs
    # decoded values are contiguous for any strides of the codes; matmuls of transposed matrices add in another order.
    sums = _multiply(decoding.values(a.codes, a.fmt, exact), decoding.values(b.codes, b.fmt, exact)).float()
    return in_dtype(scaled(sums, a.scale_inv, b.scale_inv), options.out_dtype)


def decoded_dtype(device: torch.device, out_dtype: torch.dtype) -> torch.dtype:
    """Return the fastest dtype that represents FP8 values exactly.

    Emulated matmuls on `device` decode codes to it, for a result in `out_dtype`.
    """
    # A float16 result needs float32, because sums of codes overflow float16. On CPUs without bfloat16 units, float32 is
    # several times faster, and rounds sums only once.
    fast = device.type != "cpu" or multiplies_bfloat16()
    return torch.bfloat16 if out_dtype == torch.bfloat16 and fast else torch.float32


def scaled(sums: torch.Tensor, a_inv: torch.Tensor, b_inv: torch.Tensor) -> torch.Tensor:
    """Return sums of codes times the inverse scales of both operands.

    The order of the multiplications is part of the definition: two scalars are multiplied with each other first.

    Args:
        sums: float32 [M, N].
        a_inv: float32 scalar or [M, 1].
        b_inv: float32 scalar or [N, 1].
    """
    if a_inv.ndim == b_inv.ndim == 0:
        return sums * (a_inv * b_inv)
    # `sums` is not changed in place, because selective checkpointing may have saved it.
    by_rows, columns_inv = sums * a_inv, b_inv.t() if b_inv.ndim == 2 else b_inv
    # torch 2.11 compiles a forward that ends with an operator in place to zero gradients, see `in_dtype`
    return by_rows * columns_inv if torch.compiler.is_compiling() else by_rows.mul_(columns_inv)


def _matmul_dequantized(a: Quantized, b: Quantized, out_dtype: torch.dtype) -> torch.Tensor:
    # Dequantized MX values are exact in bfloat16. Others would be rounded there, unless scales are powers of two.
    both_mx = a.block == b.block == casts.MX_BLOCK
    exact = decoded_dtype(a.codes.device, out_dtype) if both_mx else torch.float32
    return in_dtype(_multiply(_dequantized(a).to(exact), _dequantized(b).to(exact)), out_dtype)


def _multiply(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return a @ b.T in the dtype of both, ignoring autocast.

    Under autocast to float16, sums of codes would overflow.
    """
    # `is_autocast_enabled` raises for the meta device, which has no autocast.
    if a.is_meta or not torch.is_autocast_enabled(a.device.type):
        return a @ b.t()
    with torch.autocast(a.device.type, enabled=False):
        return a @ b.t()


def _dequantized(operand: Quantized) -> torch.Tensor:
    if operand.block is None or torch.compiler.is_compiling():
        return operand.dequantize()
    decoded = decoding.values(operand.codes, operand.fmt)
    blocks_inv, scale_inv = split_blocks(decoded, operand.scale_inv, operand.block)
    blocks_inv.mul_(scale_inv)  # `blocks_inv` is a view of `decoded`
    return decoded


def _matmul_scaled(a: Quantized, b: Quantized, options: MatmulOptions) -> torch.Tensor:
    a_codes = a.codes if a.codes.is_contiguous() else row_major(a.codes)
    b_codes = b.codes if b.codes.is_contiguous() else row_major(b.codes)
    a_inv, b_inv = a.scale_inv, b.scale_inv
    if b_inv.ndim == 2:  # rows of b are columns of the result
        b_inv = b_inv.t()
    # `scaled_mm` supports two scalars, or scales of rows and columns, but not one of each.
    if a_inv.ndim != b_inv.ndim:
        a_inv = a_inv.expand(a_codes.shape[0], 1).contiguous()
        b_inv = b_inv.expand(1, b_codes.shape[0]).contiguous()
    columns = b_codes.shape[0]
    if _on_cuda(a_codes):
        a_codes, b_codes, b_inv = _aligned(a_codes, b_codes, b_inv, options)
    result_dtype = options.out_dtype
    if a_inv.ndim and options.rows == "cutlass" and not ROWS_INTO_ALL_DTYPES:
        result_dtype = torch.bfloat16
    # The second operand must be column-major, as the transpose of a contiguous [N, K] is.
    scaling: Scaling = "RowWise" if a_inv.ndim else "TensorWise"
    fast = options.use_fast_accum
    y = scaled_mm(a_codes, b_codes.t(), a_inv, b_inv, (scaling, scaling), out_dtype=result_dtype, use_fast_accum=fast)
    y = y if result_dtype == options.out_dtype else y.to(options.out_dtype)
    return y if y.shape[1] == columns else y[:, :columns].contiguous()


def _on_cuda(tensor: torch.Tensor) -> bool:
    return tensor.is_cuda


def row_major(codes: torch.Tensor) -> torch.Tensor:
    """Return contiguous codes [rows, columns].

    A kernel copies column-major codes if possible: torch's copy of transposed bytes reaches only a fraction of the
    memory bandwidth.
    """
    if codes.is_contiguous() or not codes.t().is_contiguous() or not casts.launches(codes):
        return codes.contiguous()
    return copied_by_rows(codes)


@operator(
    lambda codes: codes.new_empty(codes.shape),
    lambda codes: transposed_rows(codes.t(), None),
    lambda codes: codes.shape[1] % ALIGNMENT == 0,
)
def copied_by_rows(codes: torch.Tensor) -> torch.Tensor:
    """Copy column-major codes to row-major order."""
    return codes.contiguous()


def _aligned(
    a: torch.Tensor, b: torch.Tensor, b_inv: torch.Tensor, options: MatmulOptions
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Pad codes with zeros for the hardware, if `options` allow it.

    K of a [M, K] and b [N, K], and N, become multiples of 16. Scales of added rows of b are 1.

    Raises:
        Fp8Error: If K or N requires padding that `options` do not allow.
    """
    inner, outer = -a.shape[1] % ALIGNMENT, -b.shape[0] % ALIGNMENT
    if not (inner or outer):
        return a, b, b_inv
    if (inner and not options.pad_inner) or (outer and not options.pad_outer):
        raise Fp8Error(
            f"FP8 tensor cores multiply [M, K] by [K, N] with K and N multiples of {ALIGNMENT}, got K={a.shape[1]} and "
            f"N={b.shape[0]}. Leave such layers out with module_filter_fn, or set pad_inner_dim=True."
        )
    # As bytes, because few operators support float8; the byte 0 is the value 0 in every format. The padded columns of
    # the result are removed, so their scales may be any finite number.
    a = F.pad(a.view(torch.uint8), (0, inner)).view(a.dtype)
    b = F.pad(b.view(torch.uint8), (0, inner, 0, outer)).view(b.dtype)
    return a, b, b_inv if b_inv.ndim == 0 else F.pad(b_inv, (0, outer), value=1.0)


def applies_blocks(a: Quantized, b: Quantized, out_dtype: torch.dtype) -> bool:
    """Return whether the device multiplies `a` and `b` with block scales.

    `a` is [M, K], and `b` [N, K]. False if a version of `scaled_mm` with block scales does not support their sizes.
    """
    (m, k), n = a.codes.shape, b.codes.shape[0]
    multiple = _MULTIPLE_OF_PAIR.get((a.block, b.block))  # pyrefly: ignore[bad-argument-type]
    if multiple is None or out_dtype not in (torch.bfloat16, torch.float32):
        return False
    sizes = min(m, n, k) > 0 and m % ALIGNMENT == n % ALIGNMENT == 0 and k % multiple == 0
    return sizes and multiplies_scaled_blocks(a.codes.device, a.block == casts.MX_BLOCK)


def _matmul_blocks(a: Quantized, b: Quantized, out_dtype: torch.dtype) -> torch.Tensor:
    """Return a @ b.T [M, N] in `out_dtype`, with block scales.

    The hardware accumulates in float32 after each block.
    """
    a_codes, b_codes = row_major(a.codes), row_major(b.codes)
    if a.block == casts.MX_BLOCK:
        scales, scaling = (swizzled(a.scale_inv), swizzled(b.scale_inv)), ("BlockWise1x32", "BlockWise1x32")
    else:
        scales, scaling = (_laid_out(a), _laid_out(b).t()), (_scaling(a), _scaling(b))
    return scaled_mm(a_codes, b_codes.t(), *scales, scaling, out_dtype=out_dtype)


def _scaling(operand: Quantized) -> Scaling:
    return "BlockWise128x128" if operand.block == BLOCK_128X128 else "BlockWise1x128"


def _laid_out(operand: Quantized) -> torch.Tensor:
    """Return block scales in cuBLAS's memory order.

    Scales of 1x128 blocks are column-major, and scales of 128x128 blocks row-major.
    """
    scale_inv = operand.scale_inv
    return scale_inv.contiguous() if operand.block == BLOCK_128X128 else scale_inv.t().contiguous().t()


def swizzled(scale_inv: torch.Tensor) -> torch.Tensor:
    """Return MX scales as E8M0 codes in cuBLAS's order.

    Rows and columns are padded to tiles of 128 rows and 4 columns, which are stored row by row. In a tile, the scale
    of row r and column c is byte 16 (r % 32) + 4 (r // 32) + c. Source: cuBLAS, "1D Block Scaling Factors Layout".

    Args:
        scale_inv: float32 [rows, columns], scales back from FP8.

    Returns:
        float8_e8m0fnu, one-dimensional.
    """
    # The E8M0 code of a power of two or NaN is its exponent field. 2^-127 is subnormal, and its field 0 is its code.
    codes = (scale_inv.view(torch.int32) >> 23).to(torch.uint8)
    rows, columns = codes.shape
    codes = F.pad(codes, (0, -columns % 4, 0, -rows % 128))
    tiles = codes.reshape(-1, 4, 32, codes.shape[1] // 4, 4)
    return tiles.permute(0, 3, 2, 1, 4).reshape(-1).view(torch.float8_e8m0fnu)
