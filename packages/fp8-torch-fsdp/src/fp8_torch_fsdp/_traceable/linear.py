"""Decides how an FP8 linear layer computes with a weight of which it holds some rows: gather, multiply, let go.

The backward starts the second gather first, computes the weight's gradient meanwhile, and starts to average that
before it needs the gathered weight: each collective has a product to hide behind.
"""

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from fp8_torch_fsdp import _products as products
from fp8_torch_fsdp._linear import Float8Linear
from fp8_torch_fsdp._traceable.ops import again
from fp8_torch_fsdp._traceable.parameters import gathered
from fp8_torch_fsdp._traceable.placement import local_of
from fp8_torch_fsdp._traceable.wires import Wire


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


class _GatheredProducts(torch.autograd.Function):
    """The three products of `Float8Linear`, each with the weight gathered for it and freed after."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, part: torch.Tensor, layer: TraceableFloat8Linear, record: bool
    ) -> torch.Tensor:
        wire = layer.wire
        buffers, kept = wire.buffers(part)
        started = [wire.place.start_gather(buffer) for buffer in buffers]
        rows = x.reshape(-1, x.shape[-1])
        x_operand = layer.cast("input", rows, layer.config.input, record=record)
        w_operand = wire.operand([wire.place.finish(one) for one in started], kept, record=record)
        ctx.save_for_backward(kept, *buffers, *products.kept_of_input(layer.config, rows, x_operand))
        ctx.layer, ctx.record, ctx.shape, ctx.dtype = layer, record, x.shape, x.dtype
        ctx.sent, ctx.part_dtype = len(buffers), part.dtype
        return products.output(layer, x_operand, w_operand, x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        kept, *rest = ctx.saved_tensors
        buffers, saved = rest[: ctx.sent], rest[ctx.sent :]
        layer: TraceableFloat8Linear = ctx.layer
        wire = layer.wire
        rows = grad.reshape(-1, grad.shape[-1])
        started = [wire.place.start_gather(again(b, grad)) for b in buffers] if ctx.needs_input_grad[0] else []
        shared = products.cast_once(layer, rows, ctx.record)
        grad_x = grad_part = averaging = None
        if ctx.needs_input_grad[1]:
            averaging = wire.place.start_average(products.grad_weight(layer, rows, saved, shared, ctx.part_dtype))
        if ctx.needs_input_grad[0]:
            weight: Any = wire.operand([wire.place.finish(one) for one in started], kept, record=False)
            grad_x = products.reshaped(products.grad_input(layer, rows, weight, shared).to(ctx.dtype), ctx.shape)
        if averaging is not None:
            grad_part = wire.place.finish_average(averaging, layer.out_features)
        return grad_x, grad_part, None, None
