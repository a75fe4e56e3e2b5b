"""`TraceableShards`: an FP8 linear layer that holds some rows of its weight gathers it for each product and lets it go.

The backward starts the second gather first, computes the weight's gradient meanwhile, and starts to average that
before it needs the gathered weight: each collective runs while a product is computed.
"""

from typing import Any

import torch

from fp8_common.torch.linear.operand import Operand
from fp8_torch_fsdp.layers.linear import Float8Linear
from fp8_torch_fsdp.layers.module import Distribution, with_bias
from fp8_torch_fsdp.traceable.ops import copy_in_backward
from fp8_torch_fsdp.traceable.parameters import gathered
from fp8_torch_fsdp.traceable.placement import Started, local_of
from fp8_torch_fsdp.traceable.wires import Wire


class TraceableShards(Distribution):
    """The weight of one layer, cut by rows.

    Args:
        wire: How the weight travels.
        rows: The number of rows of the whole weight.
    """

    def __init__(self, wire: Wire, rows: int) -> None:
        self.wire, self.rows = wire, rows
        self.gather = self  # a `Gather`

    def forward(self, layer: Float8Linear, input: torch.Tensor) -> torch.Tensor:
        """Return the output; the bias is gathered in high precision."""
        output = layer.fp8_matmul("weight", input, local_of(layer.weight))
        bias = None if layer.bias is None else gathered(layer.bias, self.wire.place)
        return with_bias(output, bias)

    def send(self, weight: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the scales that every rank has already, None if there are none, and this rank's part."""
        return self.wire.send(weight)

    def start(self, sent: tuple[Any, ...], grad: torch.Tensor | None) -> tuple[torch.Tensor | None, Started]:
        """Start to gather the parts."""
        scale, part = sent
        if grad is not None:
            # Only in the backward (see `ops`); in the forward there is no gradient to depend on.
            part = copy_in_backward(part, grad)
        return scale, self.wire.place.start_gather(part)

    def finish(self, started: Any, record: bool) -> Operand:
        """Return the gathered weight as an operand."""
        scale, gather = started
        return self.wire.operand(scale, self.wire.place.finish(gather), record=record)

    def start_reduce(self, grad_weight: torch.Tensor) -> Started:
        """Start to average the gradient over all ranks."""
        return self.wire.place.start_average(grad_weight)

    def finish_reduce(self, started: Any) -> torch.Tensor:
        """Return this rank's rows of the averaged gradient."""
        return self.wire.place.finish_average(started, self.rows)
