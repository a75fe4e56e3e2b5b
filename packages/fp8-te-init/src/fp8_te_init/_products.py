"""Decides how a linear layer with a primary weight computes: three FP8 products, with its codes as they are."""

from typing import Any

import torch

from fp8_common.torch._amax import amax_all
from fp8_common.torch._device import should_emulate
from fp8_common.torch._fsdp.gathered import GatheredFloat8Weight
from fp8_common.torch._operands import Operand, cast_operand
from fp8_common.torch._product import multiply
from fp8_common.torch._quantize import quantize, quantize_blockwise, quantize_rowwise
from fp8_common.torch._scaling import divide, scale_from_amax
from fp8_te_init._config import PrimaryConfig
from fp8_te_init._grids import block_of
from fp8_te_init._weight import PrimaryFloat8Weight


def linear(x: torch.Tensor, weight: torch.Tensor, config: PrimaryConfig) -> torch.Tensor:
    """Return x @ weight.T with both operands in FP8.

    Args:
        x: [..., columns], float32, bfloat16 or float16.
        weight: [rows, columns]: a primary weight, one that FSDP2 gathered, or plain values, which are cast now.
        config: How to cast and multiply.

    Returns:
        [..., rows] in the dtype of `x`; gradients arrive in the dtypes of `x` and `weight`.
    """
    return _Products.apply(x, weight, config)


def weight_operand(weight: torch.Tensor, config: PrimaryConfig) -> Operand:
    """Return the weight [rows, columns] as the operand of a product."""
    cast = config.weight
    if isinstance(weight, GatheredFloat8Weight | PrimaryFloat8Weight):
        codes, scale = weight.codes, weight.scale
    elif cast.granularity == "rowwise":
        codes, scale = quantize_rowwise(weight, cast.fp8_format, -1, cast.policy)
    elif (block := block_of(cast)) is not None:
        codes, scale = quantize_blockwise(weight, cast.fp8_format, block, cast.policy)
    else:
        scale = scale_from_amax(amax_all(weight), cast.fp8_format, cast.policy)
        codes = quantize(weight, scale, cast.fp8_format)
    return Operand(codes, divide(1.0, scale), cast.fp8_format, block_of(cast))


class _Products(torch.autograd.Function):
    """y = x w^T, dx = dy w, dw = dy^T x."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, config: PrimaryConfig) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1])
        ctx.save_for_backward(rows, weight)  # the weight itself: FSDP2 may free and refill it before the backward
        ctx.config, ctx.shape = config, x.shape
        product = _multiply(cast_operand(rows, config.input), weight_operand(weight, config), config, x.dtype)
        return _reshaped(product, (*x.shape[:-1], product.shape[-1]))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        rows, weight = ctx.saved_tensors
        grad = grad.reshape(-1, grad.shape[-1])
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            grad_x = _reshaped(_grad_input(grad, weight, ctx.config).to(rows.dtype), ctx.shape)
        if ctx.needs_input_grad[1]:
            grad_weight = _grad_weight(grad, rows, ctx.config).to(weight.dtype)
        return grad_x, grad_weight, None


def _grad_input(grad: torch.Tensor, weight: torch.Tensor, config: PrimaryConfig) -> torch.Tensor:
    """Dx = dy w; row scales of the weight go into dy before its cast, so that one set of codes serves both ways."""
    w = weight_operand(weight, config)
    if config.weight.granularity == "rowwise":
        folded = cast_operand(grad.float() * w.scale_inv.t(), config.grad_output)
        plain = Operand(w.codes.t(), torch.ones_like(w.scale_inv[0, 0]), w.fmt)
        return _multiply(folded, plain, config, grad.dtype)
    return _multiply(cast_operand(grad, config.grad_output), w.transposed(), config, grad.dtype)


def _grad_weight(grad: torch.Tensor, rows: torch.Tensor, config: PrimaryConfig) -> torch.Tensor:
    """Dw = dy^T x, contracted over the rows of the batch."""
    grad_cast, input_cast = config.grad_weight_casts
    if not input_cast.enabled:
        return grad.t() @ rows.to(grad.dtype)
    return _multiply(cast_operand(grad.t(), grad_cast), cast_operand(rows.t(), input_cast), config, grad.dtype)


def _multiply(a: Operand, b: Operand, config: PrimaryConfig, out_dtype: torch.dtype) -> torch.Tensor:
    return multiply(
        a,
        b,
        out_dtype=out_dtype,
        emulate=should_emulate(a.codes.device, config),
        use_fast_accum=config.use_fast_accum,
        pad_inner_dim=config.pad_inner_dim,
    )


def _reshaped(matrix: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Give a fresh matrix its final shape without making it a view: FSDP2 warns of modules that return views."""
    return torch.ops.aten._unsafe_view.default(matrix, shape)
