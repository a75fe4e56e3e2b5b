"""`float8_communication_report`: what travels in the all-gather of each weight and why, and how its gradient does."""

import dataclasses

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from fp8_common.torch.sharding.fsdp import reduce_scatter_of, shards
from fp8_common.torch.sharding.gathered import GatheredWeight
from fp8_torch_fsdp.all_gather.sharded_weight import ShardedFloat8Weight
from fp8_torch_fsdp.convert.heads import output_heads
from fp8_torch_fsdp.layers.linear import Float8Linear
from fp8_torch_fsdp.reduce_scatter import Float8ReduceScatter
from fp8_torch_fsdp.scales.sync import syncs_of
from fp8_torch_fsdp.scales.weight_cast import WeightCast
from fp8_torch_fsdp.traceable.wires import Float8Wire


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class WeightReport:
    """What FSDP2 gathers for one parameter.

    Attributes:
        name: Fully qualified name.
        shape: Shape of the whole parameter.
        wire: What travels: "float8_e4m3fn" or the name of a high-precision dtype.
        wire_bytes: Bytes of one gather of the whole parameter.
        saved_bytes: What that saves against gathering the parameter in `reference_dtype`.
        why: How the weight is scaled, or why it does not travel in FP8; of an output head, what its matmul does.
        gradient: "float8_e4m3fn" or "float8_e5m2" where its gradient is reduced as codes of `compress_gradients`; ""
            where FSDP2 reduces it as its policy says.
    """

    name: str
    shape: tuple[int, ...]
    wire: str
    wire_bytes: int
    saved_bytes: int
    why: str
    gradient: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CommunicationReport:
    """The weights of a model and what it has done on this rank; `str()` makes a table.

    Attributes:
        weights: One entry for each parameter.
        casts: How often weights were cast for the all-gather, in total; casts inside of graphs are not counted.
        reductions: How many MAX all-reduces for scales were issued.
    """

    weights: tuple[WeightReport, ...]
    casts: int = 0
    reductions: int = 0

    @property
    def wire_bytes(self) -> int:
        """Bytes of one gather of everything."""
        return sum(weight.wire_bytes for weight in self.weights)

    @property
    def saved_bytes(self) -> int:
        """What that saves."""
        return sum(weight.saved_bytes for weight in self.weights)

    def __str__(self) -> str:
        """Return a table with one line for each weight and the sums."""
        width = max([len(weight.name) for weight in self.weights], default=4)
        lines = [f"{'name':{width}}  {'wire':14}  {'bytes':>12}  {'saved':>12}  {'gradient':14}  why"]
        lines += [
            f"{w.name:{width}}  {w.wire:14}  {w.wire_bytes:>12,}  {w.saved_bytes:>12,}  {w.gradient:14}  {w.why}"
            for w in self.weights
        ]
        return "\n".join([*lines, f"{'sum':{width}}  {'':14}  {self.wire_bytes:>12,}  {self.saved_bytes:>12,}"])


def float8_communication_report(
    model: nn.Module, *, reference_dtype: torch.dtype = torch.bfloat16
) -> CommunicationReport:
    """Report what FSDP2 gathers for each parameter of `model`, and how it reduces its gradient.

    Args:
        model: A converted model, sharded or not; call it while its weights are sharded (`model.reshard()`).
        reference_dtype: The dtype of the gather that savings are measured against, and of parameters that travel in
            high precision.

    Returns:
        One entry per parameter, in the order of `model.named_parameters()`.
    """
    # `_parameters`, because `weight` of a parametrized layer is computed and is no parameter
    owners = {id(m._parameters.get("weight")): m for m in model.modules() if isinstance(m, nn.Linear)}
    gradients = _gradients(model)
    heads = {id(layer._parameters.get("weight")): head for head, layer in output_heads(model).items()}
    entries = []
    for name, parameter in model.named_parameters():
        entry = _entry(name, parameter, owners.get(id(parameter)), reference_dtype)
        head = heads.get(id(parameter))
        why = entry.why if head is None else f"{entry.why}. {head}"
        entries.append(dataclasses.replace(entry, why=why, gradient=gradients.get(id(_local(parameter)), "")))
    syncs = syncs_of(model)
    return CommunicationReport(
        weights=tuple(entries),
        casts=sum(slot.casts for sync in syncs for slot in sync.slots),
        reductions=sum(sync.reductions for sync in syncs),
    )


def _gradients(model: nn.Module) -> dict[int, str]:
    """Return, by the identity of its shard, the dtype of codes in which the gradient of each parameter is reduced."""
    found = {}
    for module in model.modules():
        params = list(shards(module, recurse=False)) if isinstance(module, FSDPModule) else []
        reduction = reduce_scatter_of(module) if params else None
        if isinstance(reduction, Float8ReduceScatter):
            trained = {id(param.local) for param in params if param.parameter.requires_grad}
            found |= {shard: codes for shard, codes in reduction.codes.items() if shard in trained}
    return found


def _local(parameter: torch.Tensor) -> torch.Tensor:
    return getattr(parameter, "_local_tensor", parameter)


def _entry(name: str, parameter: nn.Parameter, owner: nn.Module | None, reference: torch.dtype) -> WeightReport:
    local = _local(parameter)
    plain_bytes = parameter.numel() * reference.itemsize
    weight_cast = _cast_of(local, owner)
    if weight_cast is not None:
        cast = weight_cast.grid.cast
        wire_bytes = parameter.numel()
        wire, why = cast.fp8_format.dtype_name, f"{cast.scaling} {cast.granularity}"
        if weight_cast.decode:
            why += ", for high-precision layers"
    else:
        wire, wire_bytes, why = str(reference).removeprefix("torch."), plain_bytes, _why_not(parameter, local, owner)
    return WeightReport(
        name=name,
        shape=tuple(parameter.shape),
        wire=wire,
        wire_bytes=wire_bytes,
        saved_bytes=plain_bytes - wire_bytes,
        why=why,
    )


def _cast_of(local: torch.Tensor, owner: nn.Module | None) -> WeightCast | None:
    """Return how a weight travels in FP8: as its tensor says, or its layer under `fully_shard_traceable`."""
    if isinstance(local, ShardedFloat8Weight):
        return local.info.cast
    wire = getattr(getattr(owner, "distribution", None), "wire", None)
    return wire.slot.cast if isinstance(wire, Float8Wire) else None


def _why_not(parameter: nn.Parameter, local: torch.Tensor, owner: nn.Module | None) -> str:
    if isinstance(local, GatheredWeight):
        return "gathered at the moment: call model.reshard() first"
    if isinstance(owner, Float8Linear) and not owner.config.all_gather:
        return "all_gather is False"
    if isinstance(owner, Float8Linear):
        return "shared with a layer that is not FP8"
    if isinstance(owner, nn.Linear) and parameter.ndim == 2:
        return "its layer was not converted"
    return "not the weight of a linear layer"
