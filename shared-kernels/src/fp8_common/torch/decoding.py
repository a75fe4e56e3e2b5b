"""Values of FP8 codes: by a kernel, by torch's own operations, or as an operator that a compiler sees."""

import torch

from fp8_common._reference.quantize import MX_BLOCK
from fp8_common.formats import Format, get_format
from fp8_common.torch import numerics, rounding
from fp8_common.torch._operators import operator
from fp8_common.torch._triton import hides, launch, matrix_of, name_of, plans, takes
from fp8_common.torch.blocks import Block, block_of, scale_shape, split_blocks
from fp8_common.torch.numerics import as_float32, torch_dtype


def values(codes: torch.Tensor, fmt: Format, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return the value of every code in `dtype`, float32 or bfloat16; exact."""
    return decode_op(codes, None, fmt.name, dtype, []) if hides(codes) else rounding.values(codes, fmt, dtype)


def dequantize(
    q: torch.Tensor, scale_inv: torch.Tensor, fmt: Format, dtype: torch.dtype, block: Block = None
) -> torch.Tensor:
    """Return q * scale_inv, computed in float32 and rounded to `dtype`.

    Args:
        q: uint8 or float8 codes.
        scale_inv: float32 back from FP8, broadcasts to `q`; with `block`, one for each block.
        fmt: The format.
        dtype: That of the result.
        block: What shares a scale, where scales do not broadcast.
    """
    if torch.compiler.is_compiling():
        return decode_op(q, scale_inv, fmt.name, dtype, list(block or ()))
    if takes(q, fmt) and q.is_contiguous() and q.ndim:
        of_kernel = _block_of_kernel(q, scale_inv, block)
        if of_kernel is not None:
            plan = plans().dequantize(*matrix_of(q), fmt, name_of(dtype), of_kernel)
            given = {"q_ptr": q.view(torch_dtype(fmt)), "scale_inv_ptr": scale_inv.float().contiguous()}
            return launch(plan, q.device, **given)[0].view(q.shape)
    if block is not None:
        parts, scales = split_blocks(q, scale_inv, block)
        return dequantize(parts, scales, fmt, dtype).view(q.shape)
    return (rounding.values(q, fmt) * as_float32(scale_inv, "scale_inv")).to(dtype)


def _block_of_kernel(q: torch.Tensor, scale: torch.Tensor, block: Block) -> tuple[int, int] | None:
    """Return the block with which the kernel decodes contiguous `q`; None if it does not."""
    if block is not None:
        # Scales of another shape go to `split_blocks`, which raises the error.
        fits = tuple(scale.shape) == scale_shape(q.shape, block) and block[1] == 128
        return block if fits and (block[0] == 1 or q.ndim == 2) else None
    rows, columns = (max(size, 1) for size in matrix_of(q))
    if scale.ndim == q.ndim and scale.shape == (*q.shape[:-1], 1):
        return 1, columns
    # A block as large as the matrix stands for one scale.
    return (rows, columns) if scale.numel() == 1 and scale.ndim <= q.ndim else None


def dequantize_mx(q: torch.Tensor, scales: torch.Tensor, fmt: Format, dtype: torch.dtype) -> torch.Tensor:
    """Return `q` times the E8M0 `scales` (uint8 or float8) of its blocks of 32 in `dtype`; exact in float32."""
    scales = scales.view(torch.uint8)
    if torch.compiler.is_compiling():
        return decode_op(q, scales, fmt.name, dtype, list(MX_BLOCK))
    if takes(q, fmt) and q.is_contiguous() and q.ndim and tuple(scales.shape) == scale_shape(q.shape, MX_BLOCK):
        plan = plans().dequantize_mx(*matrix_of(q), fmt, name_of(dtype))
        return launch(plan, q.device, q_ptr=q.view(torch_dtype(fmt)), code_ptr=scales.contiguous())[0].view(q.shape)
    # bfloat16 has the exponents of float32, so that the product is rounded once in either
    exact = torch.bfloat16 if dtype == torch.bfloat16 else torch.float32
    scale_inv = numerics.scale_inv_of_e8m0(scales).to(exact)
    values_of_blocks, own = split_blocks(rounding.values(q, fmt, exact), scale_inv, MX_BLOCK)
    return values_of_blocks.mul(own).view(q.shape).to(dtype)


@operator(fake=lambda q, scale_inv, fmt, dtype, block: q.new_empty(q.shape, dtype=dtype), launches=True)
def decode_op(
    q: torch.Tensor, scale_inv: torch.Tensor | None, fmt: str, dtype: torch.dtype, block: list[int]
) -> torch.Tensor:
    """Return `values`, without a scale; `dequantize_mx`, with scales in uint8; else `dequantize`."""
    form = get_format(fmt)
    if scale_inv is None:
        return rounding.values(q, form, dtype)
    if scale_inv.dtype == torch.uint8:
        return dequantize_mx(q, scale_inv, form, dtype)
    return dequantize(q, scale_inv, form, dtype, block_of(block))
