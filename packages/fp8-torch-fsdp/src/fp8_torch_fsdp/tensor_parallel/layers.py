"""Strategies of tensor-parallel FP8 layers: `Colwise` and `Rowwise`.

Each rank multiplies by its part of the weight. In a column-parallel layer, a rank holds rows of the weight, multiplies
the whole input, and computes columns of the output. In a row-parallel layer, a rank holds columns of the weight,
multiplies columns of the input, and computes one summand of the output.
"""

import dataclasses
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from fp8_common.torch.quantized import Quantized
from fp8_common.torch_layers.linear.operand import quantize_tensorwise
from fp8_torch_fsdp.layers.linear import Float8Linear
from fp8_torch_fsdp.layers.module import ParallelStrategy, with_bias
from fp8_torch_fsdp.tensor_parallel.exchange import Cast, GatherInput, ReduceOutput, ShardPlacement


@dataclasses.dataclass(frozen=True, kw_only=True)
class TensorParallel(ParallelStrategy):
    """Communication of a tensor-parallel layer.

    Attributes:
        mesh: Mesh of one dimension.
        input_layout: Placement of an input that is a plain tensor.
        output_layout: Placement of the output.
        use_local_output: Whether to return this rank's part of the output as a plain tensor, instead of a DTensor.
    """

    mesh: DeviceMesh
    input_layout: Placement
    output_layout: Placement
    use_local_output: bool

    @property
    def group(self) -> dist.ProcessGroup:
        """Process group of the mesh."""
        return self.mesh.get_group()

    def to_output_layout(self, output: torch.Tensor, placement: Placement) -> torch.Tensor:
        """Redistribute a local output from `placement` to `output_layout`."""
        layout = _positive(self.output_layout, output)
        # An intermediate DTensor would add two autograd nodes.
        if self.use_local_output and placement == layout:
            return output
        placed = _in_layout(DTensor.from_local(output, self.mesh, [placement], run_check=False), layout)
        return placed.to_local() if self.use_local_output else placed


class Colwise(TensorParallel):
    """Shards weights by rows; multiplies whole inputs; outputs are columns."""

    @property
    def cast_options(self) -> dict[str, Any]:
        """Options of `Fp8Weight.whole`: each rank holds whole rows."""
        return {"group": self.group, "splits_rows": False}

    def forward(self, layer: Float8Linear, input: torch.Tensor) -> torch.Tensor:
        """Gather the input, in FP8 if the recipe allows it, and multiply."""
        # Partial: each rank holds some rows of the weight, and computes one summand of the input's gradient.
        whole = gather_input(layer, input, self.mesh, self.input_layout).to_local(grad_placements=[Partial()])
        bias = None if layer.bias is None else _local(layer.bias)
        output = with_bias(layer.fp8_matmul("weight", whole, _local(layer.weight)), bias)
        return self.to_output_layout(output, Shard(output.ndim - 1))


class Rowwise(TensorParallel):
    """Shards weights and inputs by columns; outputs are partial sums."""

    @property
    def cast_options(self) -> dict[str, Any]:
        """Options of `Fp8Weight.whole`: each rank holds a part of every row."""
        return {"group": self.group, "splits_rows": True}

    def forward(self, layer: Float8Linear, input: torch.Tensor) -> torch.Tensor:
        """Multiply, reduce over ranks, and add the bias to the sum.

        The gradient of a sharded output is gathered in FP8 if the recipe allows it.
        """
        placed = _in_layout(_placed(input, self.mesh, self.input_layout), Shard(input.ndim - 1))
        local = placed.to_local()
        partial = layer.fp8_matmul("weight", local, _local(layer.weight))
        record, config = layer.records, layer.config
        cast = _caster(layer, "grad_output", self.group, record) if config.shared.grad_output == "codes" else None
        layout = _positive(self.output_layout, partial)
        output = ReduceOutput.apply(partial, cast, self.mesh, layout)
        bias: Any = layer.bias
        if bias is not None and layout.is_shard():
            # Each rank adds the bias to its part of the output, and computes one summand of the bias's gradient.
            bias = _placed(bias, self.mesh, Replicate()).to_local(grad_placements=[Partial()])
        elif bias is not None:
            bias = _local(bias)
        return self.to_output_layout(with_bias(output, bias), layout)


def gather_input(layer: Float8Linear, input: torch.Tensor, mesh: DeviceMesh, layout: Placement) -> DTensor:
    """Return the whole input of a column-parallel layer, a replicated DTensor.

    A sharded input is gathered in FP8 if one cast serves all its matmuls.

    Args:
        layer: Layer whose configuration and delayed scale are used.
        input: This rank's part, or a DTensor, which an earlier call may have gathered in FP8.
        mesh: Mesh of one dimension.
        layout: Placement of an input that is a plain tensor.
    """
    # Autocast applies before the gather. Otherwise float32 values would be sent, and cast with another amax.
    if torch.is_autocast_enabled(input.device.type):
        input = input.to(torch.get_autocast_dtype(input.device.type))
    placed = _placed(input, mesh, layout)
    if placed.placements[0].is_replicate():
        return placed
    if layer.config.shared.input != "codes":
        return placed.redistribute(placements=[Replicate()])
    place = ShardPlacement(mesh, placed.placements[0], placed.shape)
    return GatherInput.apply(placed.to_local(), _caster(layer, "input", mesh.get_group(), layer.records), place)


def _caster(layer: Float8Linear, name: str, group: dist.ProcessGroup, record: bool) -> Cast:
    """Return a function that casts parts with the whole operand's scale."""
    recipe, matmul = getattr(layer.config, name), layer.fp8["weight"]

    def cast(x: torch.Tensor) -> Quantized:
        operand = quantize_tensorwise(x, recipe, matmul.scales.get(name), record=record, group=group)
        if matmul.spec.watch is not None:
            matmul.spec.watch(name, x, operand)
        return operand

    return cast


def _local(parameter: Any) -> torch.Tensor:
    """Return the local part of a parameter, which may be plain."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def _placed(input: torch.Tensor, mesh: DeviceMesh, layout: Placement) -> DTensor:
    """Return an input as a DTensor; `layout` is of plain inputs."""
    if isinstance(input, DTensor):
        return input
    return DTensor.from_local(input, mesh, [_positive(layout, input)], run_check=False)


def _in_layout(placed: DTensor, layout: Placement) -> DTensor:
    """Redistribute a DTensor unless it has the layout already.

    A redistribution without effect would cause a warning of torch, and add an autograd node.
    """
    return placed if placed.placements[0] == layout else placed.redistribute(placements=[layout])


def _positive(layout: Placement, tensor: torch.Tensor) -> Placement:
    """Return a layout of `tensor` with a non-negative dimension."""
    return Shard(layout.dim % tensor.ndim) if isinstance(layout, Shard) else layout
