"""Styles for `parallelize_module` with FP8 communication, like torch's styles."""

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
    """Shards the parameters of a `Float8Linear`, and sets its strategy."""

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
                f"{name} applies to Float8Linear layers, got {type(module).__name__}. Convert the model with "
                "convert_to_float8_training first, and use torch's own styles for other layers."
            )
        if isinstance(module.weight, DTensor):
            raise Fp8Error(f"{name} got a layer that is already distributed. Apply it once, before fully_shard.")
        module.register_parameter("weight", self._distributed(module.weight, device_mesh, self._weight))
        if module.bias is not None:
            module.register_parameter("bias", self._distributed(module.bias, device_mesh, self._bias))
        strategy = self._kind(
            mesh=device_mesh,
            input_layout=self.input_layouts,
            output_layout=self.output_layouts,
            use_local_output=self.use_local_output,
        )
        module.set_strategy(strategy)
        return module

    def _distributed(self, parameter: torch.Tensor, mesh: DeviceMesh, placement: Placement) -> nn.Parameter:
        """Return a parameter as a DTensor with this placement."""
        data: Any = parameter.data
        wrapped = isinstance(data, ShardedFloat8Weight)
        whole = distribute_tensor(data.plain if wrapped else data, mesh, [placement], src_data_rank=self.src_data_rank)
        if wrapped:
            # The part has its own state: other values and another region than the whole weight.
            part = data.fp8_weight.another()
            whole = map_local(whole.detach(), lambda local: ShardedFloat8Weight(local, part))
        return nn.Parameter(whole, requires_grad=parameter.requires_grad)


class Float8ColwiseParallel(_Float8Parallel):
    """Shards a `Float8Linear` by output columns; gathers sharded inputs in FP8.

    The gather is in FP8 if one tensorwise cast of the input serves both the output and the weight's gradient; other
    recipes gather values. Dynamic scaling needs a small all-reduce of amax before each gather, and delayed scaling with
    `initial="dynamic"` until its scale is ready (in compiled code always). Static scaling, and delayed scaling with
    `initial="one"`, need none.

    Args:
        input_layouts: Placement of an input that is a plain tensor. Default: replicated. Use `Shard(1)` for sequence
            parallelism.
        output_layouts: Placement of the output. Default: sharded along its last dimension.
        use_local_output: Whether to return this rank's part as a plain tensor, instead of a DTensor.

    Raises:
        Fp8Error: When applied to another module than a `Float8Linear`, or after `fully_shard`.

    Examples:
        >>> import torch.distributed as dist
        >>> from torch.distributed.device_mesh import init_device_mesh
        >>> from torch.distributed.tensor.parallel import parallelize_module
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> mesh = init_device_mesh("cpu", (1,))
        >>> model = convert_to_float8_training(nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)))
        >>> model = parallelize_module(model, mesh, {"0": Float8ColwiseParallel(), "2": Float8RowwiseParallel()})
        >>> model(torch.randn(8, 64)).shape
        torch.Size([8, 64])
        >>> dist.destroy_process_group()
    """

    _kind, _weight, _bias = Colwise, Shard(0), Shard(0)
    _input, _output = Replicate(), Shard(-1)


class Float8RowwiseParallel(_Float8Parallel):
    """Shards a `Float8Linear` by input columns; gathers output gradients in FP8.

    The gradient of a sharded output is gathered in FP8 if one tensorwise cast of it serves both backward matmuls; other
    recipes gather values.

    Args:
        input_layouts: Placement of an input that is a plain tensor. Default: sharded along its last dimension.
        output_layouts: Placement of the output. Default: replicated. Use `Shard(1)` for sequence parallelism.
        use_local_output: Whether to return this rank's part as a plain tensor, instead of a DTensor.

    Raises:
        Fp8Error: When applied to another module than a `Float8Linear`, or after `fully_shard`.

    Examples:
        >>> import torch.distributed as dist
        >>> from torch.distributed.device_mesh import init_device_mesh
        >>> from torch.distributed.tensor.parallel import parallelize_module
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> layer = convert_to_float8_training(nn.Linear(256, 64))
        >>> layer = parallelize_module(layer, init_device_mesh("cpu", (1,)), Float8RowwiseParallel())
        >>> layer(torch.randn(8, 256)).shape
        torch.Size([8, 64])
        >>> dist.destroy_process_group()
    """

    _kind, _weight, _bias = Rowwise, Shard(1), Replicate()
    _input, _output = Shard(-1), Replicate()


class PrepareFloat8ModuleInput(PrepareModuleInput):
    """Gathers a module's inputs once, in FP8, for its column-parallel layers.

    Args:
        fwd_config_submodule_fqn: Name of the layer whose configuration and delayed scale are used. Default: the first
            `Float8Linear` in the module.
        **layouts: Arguments of torch's `PrepareModuleInput`. Inputs that are sharded according to `input_layouts` or
            `input_kwarg_layouts`, and replicated according to `desired_input_layouts` or
            `desired_input_kwarg_layouts`, are gathered in FP8. `use_local_output` converts them to plain tensors.

    Raises:
        Fp8Error: When applied to a module without a `Float8Linear`, or whose layers cast their inputs differently.

    Examples:
        >>> import torch.distributed as dist
        >>> from torch.distributed.device_mesh import init_device_mesh
        >>> from torch.distributed.tensor import Replicate, Shard
        >>> from torch.distributed.tensor.parallel import parallelize_module
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> mesh = init_device_mesh("cpu", (1,))
        >>> model = convert_to_float8_training(nn.Sequential(nn.Linear(64, 256)))
        >>> gather = PrepareFloat8ModuleInput(input_layouts=Shard(0), desired_input_layouts=Replicate())
        >>> model = parallelize_module(model, mesh, {"": gather, "0": Float8ColwiseParallel()})
        >>> model(torch.randn(8, 64)).shape
        torch.Size([8, 256])
        >>> dist.destroy_process_group()
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
                "PrepareFloat8ModuleInput casts the input once, but the layers of this module cast their inputs "
                "differently. Convert them with one configuration, or select the layer to follow with "
                "fwd_config_submodule_fqn."
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
