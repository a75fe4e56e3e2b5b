"""Products of block-wise FP8 operands by cuBLAS, which applies scales of 1x128 and 128x128 blocks on Hopper.

Sizes and layouts are those that every version of `torch._scaled_mm` with such scales takes; other products are left to
the caller. It was compiled and traced, and has not run on a GPU yet.
"""

from functools import cache

import torch

from fp8_common._hardware import multiplies_blocks
from fp8_common._machine import parse_version
from fp8_common.torch._compat import assume_constant_result
from fp8_common.torch._operands import BLOCK_1X128, Operand

BLOCK_128X128 = (128, 128)
OUT_DTYPES = (torch.bfloat16, torch.float32)
_PAIRS = [(BLOCK_1X128, BLOCK_128X128), (BLOCK_128X128, BLOCK_1X128), (BLOCK_1X128, BLOCK_1X128)]


def applies(a: Operand, b: Operand, out_dtype: torch.dtype) -> bool:
    """Return whether the device multiplies `a` [M, K] and `b` [N, K] with their scales."""
    (m, k), n = a.codes.shape, b.codes.shape[0]
    # Rows of 128x128 scales lie at multiples of their number in some versions of torch, of 4 in others: where 4 divides
    # the number, both agree.
    whole = k % 128 == 0 if a.block == b.block else k % 512 == 0
    sizes = min(m, n, k) > 0 and m % 16 == n % 16 == 0 and whole
    return sizes and (a.block, b.block) in _PAIRS and out_dtype in OUT_DTYPES and device_multiplies(a.codes.device)


def multiply(a: Operand, b: Operand, out_dtype: torch.dtype) -> torch.Tensor:
    """Return a @ b.T [M, N] in `out_dtype`, accumulated in float32 after each block; see `applies`."""
    a_codes, b_codes = a.codes.contiguous(), b.codes.contiguous()
    return torch._scaled_mm(a_codes, b_codes.t(), _laid_out(a), _laid_out(b).t(), out_dtype=out_dtype)


def _laid_out(operand: Operand) -> torch.Tensor:
    """Return the scales as cuBLAS reads them: those of 1x128 blocks column by column, those of 128x128 row by row."""
    scale_inv = operand.scale_inv
    return scale_inv.contiguous() if operand.block == BLOCK_128X128 else scale_inv.t().contiguous().t()


# a constant of compiled graphs; Dynamo would trace into the query otherwise
@assume_constant_result
def device_multiplies(device: torch.device) -> bool:
    """Return whether `device` and this torch have products with scales of blocks."""
    return _look_up(device)


@cache
def _look_up(device: torch.device) -> bool:
    if device.type != "cuda" or torch.version.hip:
        return False
    return multiplies_blocks(torch.cuda.get_device_capability(device), parse_version(torch.version.cuda))
