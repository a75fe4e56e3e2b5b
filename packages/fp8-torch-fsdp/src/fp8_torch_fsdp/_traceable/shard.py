"""`fully_shard_traceable`: shards every parameter of a model and makes every layer gather its own."""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from fp8_common import Fp8Error
from fp8_common.torch.plugin import ShardGeometry, hooks
from fp8_torch_fsdp import _compat as compat
from fp8_torch_fsdp._linear import Float8Linear
from fp8_torch_fsdp._sharded import ShardedFloat8Weight
from fp8_torch_fsdp._traceable.linear import TraceableShards
from fp8_torch_fsdp._traceable.parameters import gather_in_forward
from fp8_torch_fsdp._traceable.placement import Placement, sharded
from fp8_torch_fsdp._traceable.plan import TraceablePlan
from fp8_torch_fsdp._traceable.wires import Float8Wire, PlainWire, Wire
from fp8_torch_fsdp._weight_state import WeightState


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
            `enable_float8_all_gather`; an `nn.MultiheadAttention`, whose layers are not called; or a mesh of three
            dimensions. All ranks see the same model and raise alike.
        Fp8UnsupportedError: This torch lacks an operator.
    """
    compat.check()
    if mesh is None:
        device = next((p.device.type for p in model.parameters() if not p.is_meta), "cpu")
        mesh = init_device_mesh(device, (dist.get_world_size(),))
    _refuse_unsuitable(model)
    layout = _Layout(mesh)
    for prefix, module in list(model.named_modules()):
        layout.apply(prefix, module)
    plan = TraceablePlan(model, layout.weights, [mesh.get_group(dim) for dim in range(mesh.ndim)])
    root: Any = model  # which keeps its plan alive
    root.fp8_plan = plan
    return model


class _Layout:
    """Shards each parameter once, however many modules share it, and makes the modules gather."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self._mesh, self._place = mesh, Placement.of(mesh)
        self._made: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}
        self._states: dict[int, tuple[nn.Parameter, WeightState]] = {}

    @property
    def weights(self) -> list[tuple[nn.Parameter, WeightState]]:
        """The weights that are gathered in FP8, with what is known about each."""
        return list(self._states.values())

    def apply(self, prefix: str, module: Any) -> None:
        parameters = {name: one for name, one in module._parameters.items() if one is not None}
        # Asked before the next line, which puts plain DTensors in place: in this mode the layers send codes themselves.
        in_fp8 = isinstance(parameters.get("weight"), ShardedFloat8Weight)
        module._parameters.update({name: self._sharded(one) for name, one in parameters.items()})
        if isinstance(module, Float8Linear):
            wire = self._wire(module, f"{prefix}.weight".lstrip("."), in_fp8)
            module.distribution = TraceableShards(wire, module.out_features)
        elif parameters:
            gather_in_forward(module, list(parameters), self._place)

    def _sharded(self, parameter: nn.Parameter) -> nn.Parameter:
        if id(parameter) not in self._made:
            plain = parameter.plain if isinstance(parameter, ShardedFloat8Weight) else parameter.data
            # the original stays alive, so that no other parameter gets its id
            self._made[id(parameter)] = (parameter, sharded(parameter, plain, self._mesh))
            hooks.mark_replaced(parameter, "fully_shard_traceable")
        return self._made[id(parameter)][1]

    def _wire(self, layer: Float8Linear, name: str, in_fp8: bool) -> Wire:
        weight = layer._parameters["weight"]
        if weight is None:
            raise Fp8Error(f"{name} is missing: a Float8Linear needs a weight.")
        state = self._state(layer, weight, name)
        if not in_fp8:
            return PlainWire(strategy=layer.strategy, place=self._place, state=state)
        # layers that share a weight share its scale
        _, state = self._states.setdefault(id(weight), (weight, state))
        return Float8Wire(strategy=layer.strategy, place=self._place, state=state)

    def _state(self, layer: Float8Linear, weight: nn.Parameter, name: str) -> WeightState:
        rows, *columns = weight.shape
        geometry = ShardGeometry(
            full_shape=weight.shape,
            first_index=self._place.first_row(rows),
            padded_shape=torch.Size((self._place.padded_rows(rows), *columns)),
        )
        return WeightState(strategy=layer.strategy, name=name, geometry=geometry)


def _refuse_unsuitable(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module, nn.MultiheadAttention):
            raise Fp8Error(
                f"{name or 'The model'} is an nn.MultiheadAttention, which reads the weight of its output projection "
                "without calling that layer: nothing would gather it. Use fully_shard, or an attention that calls its "
                "linear layers."
            )
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
