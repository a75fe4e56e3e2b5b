"""`TraceableShards`: an FP8 linear layer that holds some rows of its weight gathers it for each product and lets it go.

The backward starts the second gather first, computes the weight's gradient meanwhile, and starts to average that
before it needs the gathered weight: each collective runs while a product is computed.
"""

from typing import Any

import torch

from fp8_common.torch.plugin import LinearOperands, Operand
from fp8_torch_fsdp._linear import Distribution, Float8Linear, with_bias
from fp8_torch_fsdp._traceable.ops import copy_in_backward
from fp8_torch_fsdp._traceable.parameters import gathered
from fp8_torch_fsdp._traceable.placement import Started, local_of
from fp8_torch_fsdp._traceable.wires import Wire


class TraceableShards(Distribution):
    """The weight of one layer, cut by rows.

    Args:
        wire: How the weight travels.
        rows: The number of rows of the whole weight.
    """

    waits = True

    def __init__(self, wire: Wire, rows: int) -> None:
        self.wire, self.rows = wire, rows

    def forward(self, layer: Float8Linear, input: torch.Tensor) -> torch.Tensor:
        """Return the output; the bias is gathered in high precision."""
        output = layer.distributed_product(input, local_of(layer.weight))
        bias = None if layer.bias is None else gathered(layer.bias, self.wire.place)
        return with_bias(output, bias)

    def send_weight(self, layer: LinearOperands, weight: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return first the scales that every rank has already, None if there are none, then this rank's buffers."""
        buffers, kept = self.wire.buffers(weight)
        return (kept, *buffers)

    def start_weight(
        self, layer: LinearOperands, sent: tuple[Any, ...], grad: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, list[Started]]:
        """Start to gather the buffers."""
        kept, *buffers = sent
        if grad is not None:
            # Only in the backward (see `ops`); in the forward there is no gradient to depend on.
            buffers = [copy_in_backward(buffer, grad) for buffer in buffers]
        return kept, [self.wire.place.start_gather(buffer) for buffer in buffers]

    def finish_weight(self, layer: LinearOperands, started: Any, *, record: bool) -> Operand:
        """Return the gathered weight as an operand."""
        kept, gathers = started
        return self.wire.operand([self.wire.place.finish(one) for one in gathers], kept, record=record)

    def start_gradient(self, layer: LinearOperands, grad_weight: torch.Tensor) -> Started:
        """Start to average the gradient over all ranks."""
        return self.wire.place.start_average(grad_weight)

    def finish_gradient(self, layer: LinearOperands, started: Any) -> torch.Tensor:
        """Return this rank's rows of the averaged gradient."""
        return self.wire.place.finish_average(started, self.rows)
