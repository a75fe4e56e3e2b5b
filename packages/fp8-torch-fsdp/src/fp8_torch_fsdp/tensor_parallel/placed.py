"""`strategy_of`: strategies for weights that a framework distributes as DTensors.

The framework redistributes inputs and outputs itself. A converted layer accepts and returns DTensors, like its
unconverted form. With a weight sharded by rows, it multiplies the whole input and returns columns of the output. With a
weight sharded by columns, it multiplies columns of the input and returns a partial sum.
"""

from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from fp8_common import Fp8Error
from fp8_torch_fsdp.layers.linear import Float8Linear
from fp8_torch_fsdp.layers.module import ParallelStrategy, with_bias
from fp8_torch_fsdp.tensor_parallel.layers import Colwise, Rowwise


class ByWeight(ParallelStrategy):
    """Selects the strategy in the first forward with a distributed weight."""

    def forward(self, layer: Float8Linear, input: torch.Tensor) -> torch.Tensor:
        """Return the output, after `strategy_of` a distributed weight is set."""
        if isinstance(layer.weight, DTensor):
            layer.set_strategy(strategy_of(layer.weight, has_bias=layer.bias is not None))
            return layer.fp8_strategy.forward(layer, input)
        return super().forward(layer, input)


class Copies(ParallelStrategy):
    """Every rank holds the whole weight, and computes the whole output."""

    def forward(self, layer: Float8Linear, input: Any) -> torch.Tensor:
        """Return the output, a replicated DTensor if the input is a DTensor."""
        mesh = None
        if isinstance(input, DTensor):
            mesh, input = input.device_mesh, input.redistribute(placements=[Replicate()] * input.device_mesh.ndim)
            input = input.to_local()
        weight, bias = (p.to_local() if isinstance(p, DTensor) else p for p in (layer.weight, layer.bias))
        output = with_bias(layer.fp8_matmul("weight", input, weight), bias)
        return output if mesh is None else DTensor.from_local(output, mesh, [Replicate()] * mesh.ndim, run_check=False)


def strategy_of(weight: DTensor, *, has_bias: bool) -> ParallelStrategy:
    """Return the strategy of a linear layer with a distributed weight.

    Args:
        weight: [out_features, in_features].
        has_bias: Whether the layer adds a bias, which must be added once to a sum over ranks.

    Raises:
        Fp8Error: If the weight is sharded over a mesh of several dimensions, or by a placement other than `Shard`.
    """
    sharded_dims = [index for index, placement in enumerate(weight.placements) if not placement.is_replicate()]
    if not sharded_dims:
        return Copies()
    placement: Any = weight.placements[sharded_dims[0]]
    if len(weight.placements) != 1 or type(placement) is not Shard:
        raise Fp8Error(
            f"A weight of shape {tuple(weight.shape)} with the placements {weight.placements} cannot compute in FP8. "
            "Shard it along its rows or its columns, over a mesh of one dimension. Shard it further with fully_shard "
            "after the conversion."
        )
    mesh = weight.device_mesh
    if placement.dim % 2 == 0:
        return Colwise(mesh=mesh, input_layout=Replicate(), output_layout=Shard(-1), use_local_output=False)
    # A bias is added once, so the partial sums are reduced first.
    output = Replicate() if has_bias else Partial()
    return Rowwise(mesh=mesh, input_layout=Shard(-1), output_layout=output, use_local_output=False)
