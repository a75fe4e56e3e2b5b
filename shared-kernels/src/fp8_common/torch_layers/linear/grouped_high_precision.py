"""Matmuls of experts with few rows, by decoded weights in high precision.

Each forward and each backward decodes the FP8 codes of the weight once; rows and gradients are not cast. On GPUs that
multiply groups of bfloat16 the host never waits for the device. That path was tested with a substitute for the kernel
and never ran on a GPU.
"""

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from fp8_common.torch import decoding
from fp8_common.torch.quantized import Quantized
from fp8_common.torch_layers.linear.grouped import RowGroups
from fp8_common.torch_layers.linear.grouped_matmul import multiply_rows_wide
from fp8_common.torch_layers.linear.row_codes import RowCodes, decoded_rows
from fp8_common.torch_layers.sharding.gathered import restore_weight, save_weight


def has_few_rows(x: torch.Tensor, weight: torch.Tensor, least: int) -> bool:
    """Return whether experts get fewer rows than `least` on average.

    `x` is [rows, columns], and `weight` a stack with one matrix for each expert.
    """
    return x.shape[0] < least * weight.shape[0]


def wide_experts(
    x: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor, spec: Any, *, record: bool
) -> torch.Tensor:
    """Multiply rows in groups by decoded weights, differentiably.

    Arguments and result are those of `fp8_linear`.
    """
    x = x.clone() if isinstance(x, RowCodes) else x  # dequantizes the codes
    return _WideExperts.apply(x, weight, offsets, spec, record)


class _WideExperts(torch.autograd.Function):
    """The differentiable function of `wide_experts`."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor, spec: Any, record: bool
    ) -> torch.Tensor:
        rows = RowGroups(offsets, x.shape[0])
        # Save the weight and not its values: FSDP2 frees the gathered tensor, and gathers it again for the backward.
        compiled = torch.compiler.is_compiling()
        (mark, *_), ctx.memory = save_weight(weight, None, needed=True, keep=False, compiled=compiled)
        ctx.save_for_backward(x, weight, offsets, mark)
        ctx.spec, ctx.weight_dtype = spec, weight.dtype
        return multiply_rows_wide(x, _decoded(spec, weight, x.dtype, rows, record=record).mT, rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, offsets, mark = ctx.saved_tensors
        restore_weight(ctx.memory, (mark, None, None), ctx.spec.name)
        grad = decoded_rows(grad) if isinstance(grad, RowCodes) else grad
        rows, spec = RowGroups(offsets, x.shape[0]), ctx.spec
        needs_x, needs_weight, *_ = ctx.needs_input_grad
        grad_x = grad_weight = None
        if needs_weight:
            grad_weight = rows.matmul_wide(grad, x).to(ctx.weight_dtype)
            grad_weight = grad_weight.mT if spec.transposed else grad_weight
        if needs_x:
            # Delayed scaling has observed the weight in the forward.
            grad_x = multiply_rows_wide(grad, _decoded(spec, weight, grad.dtype, rows, record=False), rows)
        return grad_x, grad_weight, None, None, None


def _decoded(spec: Any, weight: torch.Tensor, dtype: torch.dtype, rows: RowGroups, *, record: bool) -> torch.Tensor:
    """Return the values of the weight's codes, [experts, out_features, in_features].

    The values are NaN if offsets on a GPU are invalid.
    """
    operand: Quantized = rows.checked(spec.weight_operand(weight, record, False))
    scale_inv = operand.scale_inv[:, None, None] if operand.scale_inv.ndim == 1 else operand.scale_inv
    return decoding.dequantize(operand.codes, scale_inv, operand.fmt, dtype, operand.block)
