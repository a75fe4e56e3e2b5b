"""Decides how an FP8 linear layer computes with a weight of which it holds some rows: gather, multiply, let go.

The backward starts the second gather first, computes the weight's gradient meanwhile, and starts to average that
before it needs the gathered weight: each collective has a product to hide behind.
"""

from typing import Any

import torch

from fp8_common.torch.device import should_emulate
from fp8_common.torch.operands import Operand
from fp8_common.torch.product import multiply
from fp8_torch_fsdp.linear import (
    Float8Linear,
    _cast_once,
    _grad_input,
    _grad_weight,
    _keeps_codes,
    _reshaped,
)
from fp8_torch_fsdp.traceable.ops import again
from fp8_torch_fsdp.traceable.parameters import gathered
from fp8_torch_fsdp.traceable.placement import local_of
from fp8_torch_fsdp.traceable.wires import Wire


class TraceableFloat8Linear(Float8Linear):
    """A Float8Linear that gathers its own weight; made by `fully_shard_traceable`.

    Attributes:
        wire: How the weight travels.
    """

    wire: Wire

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return input @ weight.T + bias; see `Float8Linear.forward`."""
        output = self.product(input, local_of(self.weight))
        return output if self.bias is None else output + gathered(self.bias, self.wire.place).to(output.dtype)

    def apply_products(self, input: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Return the product with the whole weight, of which `weight` is this rank's part."""
        return _GatheredProducts.apply(input, weight, self, self.records)

    def weight_operand(self, weight: torch.Tensor | Operand, *, record: bool) -> Operand:
        """Return the weight as an operand, which a gather has made of it already."""
        return weight if isinstance(weight, Operand) else super().weight_operand(weight, record=record)


class _GatheredProducts(torch.autograd.Function):
    """The three products of `Float8Linear`, each with the weight gathered for it and freed after."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, part: torch.Tensor, layer: TraceableFloat8Linear, record: bool
    ) -> torch.Tensor:
        config, wire = layer.config, layer.wire
        buffers, kept = wire.buffers(part)
        started = [wire.place.start_gather(buffer) for buffer in buffers]
        rows = x.reshape(-1, x.shape[-1])
        x_operand = layer.cast("input", rows, config.input, record=record)
        w_operand = wire.operand([wire.place.finish(one) for one in started], kept, record=record)
        saved = (x_operand.codes, x_operand.scale_inv) if _keeps_codes(config) else (rows,)
        ctx.save_for_backward(kept, *buffers, *saved)
        ctx.layer, ctx.record, ctx.shape, ctx.dtype = layer, record, x.shape, x.dtype
        ctx.sent, ctx.part_dtype = len(buffers), part.dtype
        output = multiply(
            x_operand,
            w_operand,
            out_dtype=x.dtype,
            emulate=should_emulate(x.device, config),
            use_fast_accum=config.gemms.fast_accum_output,
            pad_inner_dim=config.pad_inner_dim,
        )
        return _reshaped(output, (*x.shape[:-1], output.shape[-1]))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        kept, *rest = ctx.saved_tensors
        buffers, saved = rest[: ctx.sent], rest[ctx.sent :]
        layer: TraceableFloat8Linear = ctx.layer
        wire = layer.wire
        rows = grad.reshape(-1, grad.shape[-1])
        started = [wire.place.start_gather(again(b, grad)) for b in buffers] if ctx.needs_input_grad[0] else []
        shared = _cast_once(layer, rows, ctx.record)
        grad_x = grad_part = averaging = None
        if ctx.needs_input_grad[1]:
            averaging = wire.place.start_average(_grad_weight(layer, rows, saved, shared, ctx.part_dtype))
        if ctx.needs_input_grad[0]:
            weight: Any = wire.operand([wire.place.finish(one) for one in started], kept, record=False)
            grad_x = _reshaped(_grad_input(layer, rows, weight, shared).to(ctx.dtype), ctx.shape)
        if averaging is not None:
            grad_part = wire.place.finish_average(averaging, layer.out_features)
        return grad_x, grad_part, None, None
