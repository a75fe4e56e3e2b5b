"""Styles for `parallelize_module` with FP8 communication, compatible with torch's."""

import copy
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle, PrepareModuleInput

from fp8_common import Fp8Error
from fp8_common.torch.compat import map_local
from fp8_torch_fsdp.all_gather.sharded_weight import ShardedFloat8Weight
from fp8_torch_fsdp.layers.linear import Float8Linear
from fp8_torch_fsdp.tensor_parallel.layers import Colwise, Rowwise, TensorParallel, gather_input


class _Float8Parallel(ParallelStyle):
    """Shards the parameters of one layer and sets its communication."""

    _kind: type[TensorParallel]
    _weight: Placement
    _bias: Placement

    _input: Placement
    _output: Placement

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
    ) -> None:
        super().__init__()
        self.input_layouts, self.output_layouts = input_layouts or self._input, output_layouts or self._output
        self.use_local_output = use_local_output

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        name = type(self).__name__
        if not isinstance(module, Float8Linear):
            raise Fp8Error(
                f"{name} makes Float8Linear layers parallel, got {type(module).__name__}. Convert the model with "
                "convert_to_float8_training first, and use torch's own styles for other layers."
            )
        if isinstance(module.weight, DTensor):
            raise Fp8Error(f"{name} got a layer that is already distributed. Apply it once, before fully_shard.")
        module.register_parameter("weight", self._cut(module.weight, device_mesh, self._weight))
        if module.bias is not None:
            module.register_parameter("bias", self._cut(module.bias, device_mesh, self._bias))
        distribution = self._kind(
            mesh=device_mesh,
            input_layout=self.input_layouts,
            output_layout=self.output_layouts,
            use_local_output=self.use_local_output,
        )
        module.set_strategy(distribution)
        return module

    def _cut(self, parameter: torch.Tensor, mesh: DeviceMesh, placement: Placement) -> nn.Parameter:
        data: Any = parameter.data
        wrapped = isinstance(data, ShardedFloat8Weight)
        whole = distribute_tensor(data.plain if wrapped else data, mesh, [placement], src_data_rank=self.src_data_rank)
        if wrapped:
            # the part is another weight than the whole one
            part = data.fp8_weight.another()
            whole = map_local(whole.detach(), lambda local: ShardedFloat8Weight(local, part))
        return nn.Parameter(whole, requires_grad=parameter.requires_grad)


class Float8ColwiseParallel(_Float8Parallel):
    """Shards `Float8Linear` by output columns; gathers sharded inputs in FP8.

    The gather is in FP8 if one tensorwise cast of the input serves output and gradient of the weight; other recipes
    gather the values. Delayed scaling with `initial="one"` needs no all-reduce for it, other scaling a small one.

    Args:
        input_layouts: How a plain input is cut; replicated by default, `Shard(1)` under sequence parallelism.
        output_layouts: How the output shall be cut; along its last dimension by default.
        use_local_output: Return this rank's part as a plain tensor instead of a DTensor.

    Raises:
        Fp8Error: When applied to something else than a `Float8Linear`, or after `fully_shard`.
    """

    _kind, _weight, _bias = Colwise, Shard(0), Shard(0)
    _input, _output = Replicate(), Shard(-1)


class Float8RowwiseParallel(_Float8Parallel):
    """Shards `Float8Linear` by input columns; gathers output gradients in FP8.

    The gather is in FP8 if one tensorwise cast of the gradient serves both backward matmuls; other recipes gather
    values.

    Args:
        input_layouts: How a plain input is cut; along its last dimension by default.
        output_layouts: How the output shall be cut; replicated by default, `Shard(1)` under sequence parallelism.
        use_local_output: Return this rank's part as a plain tensor instead of a DTensor.

    Raises:
        Fp8Error: When applied to something else than a `Float8Linear`, or after `fully_shard`.
    """

    _kind, _weight, _bias = Rowwise, Shard(1), Replicate()
    _input, _output = Shard(-1), Replicate()


class PrepareFloat8ModuleInput(PrepareModuleInput):
    """Gathers a module's input once in FP8 for its column-parallel layers.

    Args:
        fwd_config_submodule_fqn: The layer whose configuration and delayed scale are used; by default the first
            `Float8Linear` in the module.
        **layouts: The arguments of torch's `PrepareModuleInput`. Inputs that `input_layouts` and `input_kwarg_layouts`
            declare sharded and that `desired_input_layouts` and `desired_input_kwarg_layouts` declare replicated are
            gathered in FP8; with `use_local_output` they become plain tensors.

    Raises:
        Fp8Error: When applied to a module without such a layer, or whose layers cast their inputs differently.
    """

    _layer: Float8Linear

    def __init__(self, *, fwd_config_submodule_fqn: str | None = None, **layouts: Any) -> None:
        super().__init__(**layouts)
        self.fwd_config_submodule_fqn = fwd_config_submodule_fqn

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        fqn = self.fwd_config_submodule_fqn
        layers = [module.get_submodule(fqn)] if fqn else list(module.modules())
        linears = [layer for layer in layers if isinstance(layer, Float8Linear)]
        if not linears:
            raise Fp8Error(
                f"PrepareFloat8ModuleInput found no Float8Linear in {type(module).__name__}{f' at {fqn!r}' * bool(fqn)}"
                ". Convert the model first, or use torch's PrepareModuleInput."
            )
        if len({layer.config.input for layer in linears}) > 1:
            raise Fp8Error(
                "PrepareFloat8ModuleInput casts the input once, but the layers in this module cast theirs differently. "
                "Give them one configuration, or name the layer to follow with fwd_config_submodule_fqn."
            )
        style = copy.copy(self)  # one style object may serve many modules
        style._layer = linears[0]
        return super(PrepareFloat8ModuleInput, style)._apply(module, device_mesh)

    def _prepare_input_arg(
        self, input: Any, mesh: DeviceMesh, input_layout: Placement | None, desired_layout: Placement | None
    ) -> Any:
        gathers = input_layout is not None and desired_layout is not None and desired_layout.is_replicate()
        if not (gathers and isinstance(input, torch.Tensor) and input.is_floating_point()):
            return super()._prepare_input_arg(input, mesh, input_layout, desired_layout)
        whole = gather_input(self._layer, input, mesh, input_layout)
        return whole.to_local() if self.use_local_output else whole
