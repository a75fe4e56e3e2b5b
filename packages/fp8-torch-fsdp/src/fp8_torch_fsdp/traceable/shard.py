"""Decides what `fully_shard_traceable` does to a model: shard every parameter, make every layer gather its own."""

import weakref

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from fp8_common.errors import Fp8Error
from fp8_common.torch.fsdp import WeightState
from fp8_torch_fsdp import compat
from fp8_torch_fsdp.linear import Float8Linear
from fp8_torch_fsdp.sharded import ShardedFloat8Weight
from fp8_torch_fsdp.traceable.linear import TraceableFloat8Linear
from fp8_torch_fsdp.traceable.parameters import gather_in_forward
from fp8_torch_fsdp.traceable.placement import Placement, sharded
from fp8_torch_fsdp.traceable.plan import TraceablePlan
from fp8_torch_fsdp.traceable.wires import Float8Wire, PlainWire, Wire


def fully_shard_traceable(model: nn.Module, *, mesh: DeviceMesh | None = None) -> nn.Module:
    """Shard the parameters of `model` so that torch.compile captures their gathers. Call it once, on the root.

    Call it after `convert_to_float8_training` and before making the optimizer, in place of `fully_shard`. Parameters
    become DTensors that hold this rank's rows, as FSDP2's do; gradients and state dicts follow. FP8 weights are
    gathered as codes, others in the dtype they are stored in; linear layers gather again in the backward, so that no
    weight outlives its product. Gradients are averaged over all ranks in the dtype of the parameter.

    Args:
        model: The root, which must be the module that is called; on the meta device too.
        mesh: One dimension to shard over, or two for HSDP (copies, shards); all ranks by default.

    Returns:
        `model`, changed in place.

    Raises:
        Fp8Error: A parameter that is distributed already, has no dimensions, or belongs to
            `enable_float8_all_gather`; or a mesh of three dimensions. All ranks see the same model and raise alike.
        Fp8UnsupportedError: This torch lacks an operator.
    """
    compat.check()
    if mesh is None:
        device = next((p.device.type for p in model.parameters() if not p.is_meta), "cpu")
        mesh = init_device_mesh(device, (dist.get_world_size(),))
    place = Placement.of(mesh)
    _refuse_unsuitable(model)
    owners = [(prefix, module) for prefix, module in model.named_modules() if list(module.parameters(recurse=False))]
    shards, states = _Shards(mesh), dict[int, tuple[nn.Parameter, WeightState]]()
    for prefix, module in owners:
        names = [name for name, parameter in module._parameters.items() if parameter is not None]
        wraps = isinstance(module, Float8Linear) and isinstance(module._parameters["weight"], ShardedFloat8Weight)
        for name in names:
            module._parameters[name] = shards.of(module._parameters[name])
        if not isinstance(module, Float8Linear):
            gather_in_forward(module, names, place)
            continue
        weight = module._parameters["weight"]
        wire = _wire_of(module, weight, place, f"{prefix}.weight".lstrip("."), wraps)
        module.__class__ = TraceableFloat8Linear
        module.wire = wire
        if wraps:
            # layers that share a weight share its scale
            module.wire = Float8Wire(
                strategy=wire.strategy, place=place, state=states.setdefault(id(weight), (weight, wire.state))[1]
            )
    plan = TraceablePlan(model, list(states.values()), [mesh.get_group(dim) for dim in range(mesh.ndim)])
    for _, state in states.values():
        state.plan = weakref.ref(plan)
    model.fp8_plan = plan
    return model


class _Shards:
    """Shards each parameter once, however many modules share it."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self._mesh, self._made = mesh, dict[int, tuple[nn.Parameter, nn.Parameter]]()

    def of(self, parameter: nn.Parameter) -> nn.Parameter:
        if id(parameter) not in self._made:
            plain = parameter.plain if isinstance(parameter, ShardedFloat8Weight) else parameter.data
            self._made[id(parameter)] = (parameter, sharded(parameter, plain, self._mesh))
        return self._made[id(parameter)][1]


def _wire_of(layer: Float8Linear, weight: nn.Parameter, place: Placement, name: str, in_fp8: bool) -> Wire:
    rows, *columns = weight.shape
    state = WeightState(strategy=layer.strategy, name=name)
    state.full_shape = weight.shape
    state.padded_shape = weight.shape[:0] + (place.padded_rows(rows), *columns)
    state.first_row = place.first_row(rows)
    return (Float8Wire if in_fp8 else PlainWire)(strategy=layer.strategy, place=place, state=state)


def _refuse_unsuitable(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor):
            raise Fp8Error(
                f"{name} is distributed already. Call fully_shard_traceable once, on the root, instead of fully_shard."
            )
        if isinstance(parameter, ShardedFloat8Weight) and parameter.strategy.decode:
            raise Fp8Error(
                f"{name} was given to enable_float8_all_gather, which works under fully_shard only. Convert its layer "
                "with convert_to_float8_training, or use fully_shard."
            )
