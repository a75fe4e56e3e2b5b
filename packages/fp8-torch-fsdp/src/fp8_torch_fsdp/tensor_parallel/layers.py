"""Tensor-parallel FP8 layers: inputs, local matmuls, outputs.

Each rank multiplies its part of the weight. A column-parallel layer holds rows of the weight, sees the whole input and
makes its columns of the output; a row-parallel layer holds columns, sees its columns of the input and makes a part of
the sum that is the output.
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
    """Communication of one layer.

    Attributes:
        mesh: The ranks, one dimension.
        input_layout: How a plain input is cut.
        output_layout: How the output is cut.
        use_local_output: Return this rank's part as a plain tensor, else a DTensor.
    """

    mesh: DeviceMesh
    input_layout: Placement
    output_layout: Placement
    use_local_output: bool

    @property
    def group(self) -> dist.ProcessGroup:
        """The ranks."""
        return self.mesh.get_group()

    def leave(self, output: torch.Tensor, now: Placement) -> torch.Tensor:
        """Redistribute a local output from placement `now` to the wanted layout."""
        wanted = _positive(self.output_layout, output)
        # nothing to do: an intermediate DTensor would cost two autograd nodes
        if self.use_local_output and now == wanted:
            return output
        placed = _in_layout(DTensor.from_local(output, self.mesh, [now], run_check=False), wanted)
        return placed.to_local() if self.use_local_output else placed


class Colwise(TensorParallel):
    """Rows of the weight, the whole input, columns of the output."""

    @property
    def parts(self) -> dict[str, Any]:
        """Whole rows are here."""
        return {"group": self.group, "splits_rows": False}

    def forward(self, layer: Float8Linear, input: torch.Tensor) -> torch.Tensor:
        """Gather the input, multiply; the output is sharded on columns.

        The gather is in FP8 if the recipe allows.
        """
        # Partial: each rank has some rows of the weight, so its gradient of the input is one summand.
        whole = gather_input(layer, input, self.mesh, self.input_layout).to_local(grad_placements=[Partial()])
        bias = None if layer.bias is None else _local(layer.bias)
        output = with_bias(layer.fp8_matmul("weight", whole, _local(layer.weight)), bias)
        return self.leave(output, Shard(output.ndim - 1))


class Rowwise(TensorParallel):
    """Shards weight and input by columns; outputs are partial sums."""

    @property
    def parts(self) -> dict[str, Any]:
        """Each rank has a piece of every row."""
        return {"group": self.group, "splits_rows": True}

    def forward(self, layer: Float8Linear, input: torch.Tensor) -> torch.Tensor:
        """Multiply, reduce, add the bias once.

        The gradient of a sharded output is gathered in FP8 if the recipe allows.
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
            # Each rank adds the bias to its part of the output alone, and sees a summand of its gradient.
            bias = _placed(bias, self.mesh, Replicate()).to_local(grad_placements=[Partial()])
        elif bias is not None:
            bias = _local(bias)
        return self.leave(with_bias(output, bias), layout)


def gather_input(layer: Float8Linear, input: torch.Tensor, mesh: DeviceMesh, layout: Placement) -> DTensor:
    """Return a column-parallel layer's whole input, a replicated DTensor.

    In FP8 if it was sharded and one cast serves all uses.

    Args:
        layer: Whose configuration and delayed scale are used.
        input: This rank's part, or a DTensor (whose codes an earlier gather may have made).
        mesh: The ranks.
        layout: How a plain input is cut.
    """
    # Before the gather, or float32 values would be sent and be cast to FP8 with another amax than autocast's.
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
    """Return a cast of a local part with the whole operand's scale."""
    recipe, matmul = getattr(layer.config, name), layer.fp8["weight"]

    def cast(x: torch.Tensor) -> Quantized:
        operand = quantize_tensorwise(x, recipe, matmul.scales.get(name), record=record, group=group)
        if matmul.spec.watch is not None:
            matmul.spec.watch(name, x, operand)
        return operand

    return cast


def _local(parameter: Any) -> torch.Tensor:
    """Return the local part of a parameter, DTensor or already local."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def _placed(input: torch.Tensor, mesh: DeviceMesh, layout: Placement) -> DTensor:
    if isinstance(input, DTensor):
        return input
    return DTensor.from_local(input, mesh, [_positive(layout, input)], run_check=False)


def _in_layout(placed: DTensor, wanted: Placement) -> DTensor:
    """Redistribute if needed.

    torch would warn otherwise, and autograd would get an unused node.
    """
    return placed if placed.placements[0] == wanted else placed.redistribute(placements=[wanted])


def _positive(layout: Placement, tensor: torch.Tensor) -> Placement:
    """Return the layout with its dimension counted from the front."""
    return Shard(layout.dim % tensor.ndim) if isinstance(layout, Shard) else layout
