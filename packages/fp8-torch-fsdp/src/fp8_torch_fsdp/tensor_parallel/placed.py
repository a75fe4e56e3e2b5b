"""FP8 layers whose weights a framework distributes as DTensors.

The framework's own code redistributes inputs and outputs. A layer in between accepts and returns DTensors, like its
unconverted form: whole input and columns of the output for a weight sharded along its rows, columns of the input and a
partial sum for a weight sharded along its columns.
"""

from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from fp8_common import Fp8Error
from fp8_torch_fsdp.layers.linear import Float8Linear
from fp8_torch_fsdp.layers.module import ParallelStrategy, with_bias
from fp8_torch_fsdp.tensor_parallel.layers import Colwise, Rowwise


class ByWeight(ParallelStrategy):
    """Decides in the first forward in which the weight is a DTensor."""

    def forward(self, layer: Float8Linear, input: torch.Tensor) -> torch.Tensor:
        """Follow the placement of the weight from now on."""
        if isinstance(layer.weight, DTensor):
            layer.set_strategy(strategy_of(layer.weight, has_bias=layer.bias is not None))
            return layer.fp8_strategy.forward(layer, input)
        return super().forward(layer, input)


class Copies(ParallelStrategy):
    """Every rank holds the whole weight and computes the whole output."""

    def forward(self, layer: Float8Linear, input: Any) -> torch.Tensor:
        """Multiply the whole input; keep the output on its ranks."""
        mesh = None
        if isinstance(input, DTensor):
            mesh, input = input.device_mesh, input.redistribute(placements=[Replicate()] * input.device_mesh.ndim)
            input = input.to_local()
        weight, bias = (p.to_local() if isinstance(p, DTensor) else p for p in (layer.weight, layer.bias))
        output = with_bias(layer.fp8_matmul("weight", input, weight), bias)
        return output if mesh is None else DTensor.from_local(output, mesh, [Replicate()] * mesh.ndim, run_check=False)


def strategy_of(weight: DTensor, *, has_bias: bool) -> ParallelStrategy:
    """Return how a layer works whose weight lies as `weight` does.

    Args:
        weight: [out_features, in_features].
        has_bias: Whether the layer adds a bias, which a sum over ranks must hold once.

    Raises:
        Fp8Error: It is sharded over two dimensions of the mesh, or in separate pieces.
    """
    cut = [index for index, placement in enumerate(weight.placements) if not placement.is_replicate()]
    if not cut:
        return Copies()
    placement: Any = weight.placements[cut[0]]
    if len(weight.placements) != 1 or type(placement) is not Shard:
        raise Fp8Error(
            f"A weight of shape {tuple(weight.shape)} that lies as {weight.placements} cannot compute in FP8. Cut it "
            "along its rows or its columns, over a mesh of one dimension; shard it further with fully_shard after the "
            "conversion."
        )
    mesh = weight.device_mesh
    if placement.dim % 2 == 0:
        return Colwise(mesh=mesh, input_layout=Replicate(), output_layout=Shard(-1), use_local_output=False)
    # a bias is no summand of each rank: it is added to the whole sum
    output = Replicate() if has_bias else Partial()
    return Rowwise(mesh=mesh, input_layout=Shard(-1), output_layout=output, use_local_output=False)
