"""Dequantization of FP8 codes: `values`, `dequantize` and `dequantize_mx`.

Each is an `operator`; see `_operators` for the implementations.
"""

import torch

from fp8_common._reference.quantize import MX_BLOCK
from fp8_common.formats import Format
from fp8_common.torch import numerics, rounding
from fp8_common.torch._operators import operator
from fp8_common.torch._triton import launch, matrix_of, name_of, plans
from fp8_common.torch.blocks import Block, scale_shape, split_blocks
from fp8_common.torch.numerics import as_float32, in_dtype, torch_dtype

values = operator(
    lambda codes, fmt, dtype=torch.float32: codes.new_empty(codes.shape, dtype=dtype),
    traced=True,
)(rounding.values)


def _block_of_kernel(
    q: torch.Tensor, scale_inv: torch.Tensor, fmt: object, dtype: object, block: Block = None
) -> tuple[int, int] | None:
    """Return the block size for the kernel; None without a kernel."""
    if not q.is_contiguous() or q.ndim == 0:
        return None
    if block is not None:
        # With scales of a wrong shape, the reference raises an error in `split_blocks`.
        fits = tuple(scale_inv.shape) == scale_shape(q.shape, block) and block[1] == 128
        return block if fits and (block[0] == 1 or q.ndim == 2) else None
    rows, columns = (max(size, 1) for size in matrix_of(q))
    if scale_inv.ndim == q.ndim and scale_inv.shape == (*q.shape[:-1], 1):
        return 1, columns
    # A single scale is a block as large as the matrix.
    return (rows, columns) if scale_inv.numel() == 1 and scale_inv.ndim <= q.ndim else None


def _by_kernel(
    q: torch.Tensor, scale_inv: torch.Tensor, fmt: Format, dtype: torch.dtype, block: Block = None
) -> torch.Tensor:
    plan = plans().dequantize(*matrix_of(q), fmt, name_of(dtype), _block_of_kernel(q, scale_inv, fmt, dtype, block))
    given = {"q_ptr": q.view(torch_dtype(fmt)), "scale_inv_ptr": scale_inv.float().contiguous()}
    return launch(plan, q.device, **given)[0].view(q.shape)


@operator(
    lambda q, scale_inv, fmt, dtype, block=None: q.new_empty(q.shape, dtype=dtype),
    _by_kernel,
    lambda *given: _block_of_kernel(*given) is not None,
)
def dequantize(
    q: torch.Tensor, scale_inv: torch.Tensor, fmt: Format, dtype: torch.dtype, block: Block = None
) -> torch.Tensor:
    """Return q * scale_inv, computed in float32 and rounded to `dtype`.

    Args:
        q: uint8 or float8 codes, any shape.
        scale_inv: Scales back from FP8, float32, broadcastable to `q`; with `block`, one per block.
        fmt: FP8 format.
        dtype: dtype of the result.
        block: Block size of the scales; None if they broadcast.
    """
    if block is not None:
        return dequantize(*split_blocks(q, scale_inv, block), fmt, dtype).view(q.shape)
    return in_dtype(rounding.values(q, fmt) * as_float32(scale_inv, "scale_inv"), dtype)


def _mx_by_kernel(q: torch.Tensor, scales: torch.Tensor, fmt: Format, dtype: torch.dtype) -> torch.Tensor:
    plan = plans().dequantize_mx(*matrix_of(q), fmt, name_of(dtype))
    codes = scales.view(torch.uint8).contiguous()
    return launch(plan, q.device, q_ptr=q.view(torch_dtype(fmt)), code_ptr=codes)[0].view(q.shape)


@operator(
    lambda q, scales, fmt, dtype: q.new_empty(q.shape, dtype=dtype),
    _mx_by_kernel,
    lambda q, scales, *_: q.is_contiguous() and q.ndim and tuple(scales.shape) == scale_shape(q.shape, MX_BLOCK),
)
def dequantize_mx(q: torch.Tensor, scales: torch.Tensor, fmt: Format, dtype: torch.dtype) -> torch.Tensor:
    """Return the values of MX codes in `dtype`; exact in float32.

    `q` are codes [..., N], `scales` E8M0 scales back [..., ceil(N / 32)], both uint8 or float8.
    """
    # bfloat16 has the exponents of float32, so the result is rounded only once with either dtype.
    exact = torch.bfloat16 if dtype == torch.bfloat16 else torch.float32
    scale_inv = numerics.scale_inv_of_e8m0(scales.view(torch.uint8)).to(exact)
    values_of_blocks, blocks_inv = split_blocks(rounding.values(q, fmt, exact), scale_inv, MX_BLOCK)
    return in_dtype(values_of_blocks.mul(blocks_inv).view(q.shape), dtype)
