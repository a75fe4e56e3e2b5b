"""`fully_shard_traceable`: shards a model whose layers gather their parameters."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from fp8_common import Fp8Error
from fp8_common.torch_layers.sharding.agreement import group_of_ranks
from fp8_common.torch_layers.sharding.replaced import mark_replaced
from fp8_common.torch_layers.sharding.scale_grid import Region
from fp8_torch_fsdp.all_gather.sharded_weight import ShardedFloat8Weight
from fp8_torch_fsdp.layers.linear import Float8Linear
from fp8_torch_fsdp.scales.delayed import delayed_scales
from fp8_torch_fsdp.scales.sync import ScaleSync
from fp8_torch_fsdp.scales.sync_group import SyncGroup
from fp8_torch_fsdp.scales.weight import Fp8Weight
from fp8_torch_fsdp.traceable.linear import TraceableShards
from fp8_torch_fsdp.traceable.parameters import gather_in_forward
from fp8_torch_fsdp.traceable.placement import Placement, local_of, sharded


def fully_shard_traceable(model: nn.Module, *, mesh: DeviceMesh | None = None) -> nn.Module:
    """Shard `model`'s parameters so that torch.compile captures their gathers.

    Call it once, on the root, instead of `fully_shard`: after `convert_to_float8_training`, and before the optimizer is
    created. Parameters become DTensors with this rank's rows, as under FSDP2, and so do gradients and state dicts. FP8
    weights are gathered as codes, other parameters in their stored dtype. FP8 layers gather again in the backward, so
    that a gathered weight is freed after its matmul. Gradients are averaged over all ranks, in the dtype of the
    parameter.

    Args:
        model: Root module, which must be the module that is called. It may be on the meta device.
        mesh: Mesh of one dimension to shard over, or of two for HSDP (replicas, shards). Default: all ranks.

    Returns:
        `model`, modified in place.

    Raises:
        Fp8Error: If a parameter is distributed already or has no dimensions, a layer has an MX recipe, the model
            contains an `nn.MultiheadAttention`, which does not call its output projection, or the mesh has more than
            two dimensions. All ranks have the same model and raise the same error.

    Examples:
        >>> import torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> model = convert_to_float8_training(nn.Sequential(nn.Linear(64, 64)))
        >>> model = fully_shard_traceable(model)
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> model(torch.randn(8, 64)).sum().backward()
        >>> type(model[0].weight.grad).__name__
        'DTensor'
        >>> dist.destroy_process_group()
    """
    if mesh is None:
        device = next((p.device.type for p in model.parameters() if not p.is_meta), "cpu")
        mesh = init_device_mesh(device, (dist.get_world_size(),))
    _check_model(model)
    place = Placement.of(mesh)
    # By id of the original, which is kept alive, so that no other parameter gets its id.
    replaced: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}
    weights: dict[int, Fp8Weight] = {}
    for prefix, module in list(model.named_modules()):
        parameters = {name: parameter for name, parameter in module._parameters.items() if parameter is not None}
        # Checked before plain DTensors replace the wrappers: here the layers send codes themselves.
        in_fp8 = isinstance(parameters.get("weight"), ShardedFloat8Weight)
        for name, parameter in parameters.items():
            if id(parameter) not in replaced:
                plain = parameter.plain if isinstance(parameter, ShardedFloat8Weight) else parameter.data
                replaced[id(parameter)] = parameter, sharded(parameter, plain, mesh)
                mark_replaced(parameter, "fully_shard_traceable")
            module._parameters[name] = replaced[id(parameter)][1]
        if isinstance(module, Float8Linear):
            weight = weights.get(id(module.weight)) or _placed(module, f"{prefix}.weight".lstrip("."), place)
            if in_fp8:  # layers that share a weight share its state
                weights[id(module.weight)] = weight
            module.set_strategy(TraceableShards(weight=weight, place=place, in_fp8=in_fp8))
        elif parameters:
            gather_in_forward(module, list(parameters), place)
    ranks = tuple(sorted(mesh.mesh.reshape(-1).tolist()))
    group = SyncGroup(
        group_of_ranks(ranks, mesh.get_group(mesh.ndim - 1)), list(weights.values()), delayed_scales(model)
    )
    ScaleSync(model, [group], sharded=True)
    return model


def _placed(layer: Float8Linear, name: str, place: Placement) -> Fp8Weight:
    """Return the state of a layer's weight, with this rank's rows."""
    weight = layer._parameters["weight"]
    if weight is None:
        raise Fp8Error(f"{name} is missing: a Float8Linear needs a weight.")
    rows, *columns = weight.shape
    return layer.fp8["weight"].weight.place(
        name,
        # The attribute is read in each call, because loading with `assign=True` replaces the parameter.
        lambda: local_of(layer.weight).detach(),
        Region.along(0, place.first_row(rows), weight.shape),
        torch.Size((place.padded_rows(rows), *columns)),
        weight.device,
    )


def _check_model(model: nn.Module) -> None:
    """Raise for models that `fully_shard_traceable` does not support."""
    for name, module in model.named_modules():
        if isinstance(module, Float8Linear) and module.fp8_config.weight.granularity == "mx":
            raise Fp8Error(
                f"{name or 'The model'} has an MX recipe, which only fully_shard gathers. Use it, or another recipe."
            )
        if isinstance(module, nn.MultiheadAttention):
            raise Fp8Error(
                f"{name or 'The model'} is an nn.MultiheadAttention, which reads the weight of its output projection "
                "without calling that layer, so it would not be gathered. Use fully_shard, or an attention that calls "
                "its linear layers."
            )
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor):
            raise Fp8Error(
                f"{name} is distributed already. Call fully_shard_traceable once, on the root, instead of fully_shard."
            )
