"""`SyncGroup`: weights of one all-reduce; `ModelStructure`: detects changes of a model."""

import dataclasses
from collections.abc import Iterable, Sequence
from itertools import chain

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fp8_common.torch_layers.sharding.agreement import group_of_ranks, ranks_along
from fp8_common.torch_layers.sharding.fsdp import Shard
from fp8_torch_fsdp.scales.delayed import DelayedScale
from fp8_torch_fsdp.scales.weight import Fp8Weight


@dataclasses.dataclass(eq=False)
class SyncGroup:
    """Weights and delayed scales that the same ranks agree on.

    Attributes:
        ranks: The ranks; None for this rank alone.
        weights: Weights.
        scales: Delayed scales.
        due: Whether an optimizer step ended since the last agreement.
    """

    ranks: dist.ProcessGroup | None
    weights: list[Fp8Weight] = dataclasses.field(default_factory=list)
    scales: list[DelayedScale] = dataclasses.field(default_factory=list)
    due: bool = False


class ModelStructure:
    """Modules and parameters of a model at the last look.

    A look costs a model of any size a few microseconds: it compares numbers of objects and keeps none alive.
    """

    def __init__(self) -> None:
        self._tables: list[dict] = []
        self._numbers: list[int] = []

    def has_changed(self, root: nn.Module) -> bool:
        """Return whether a module or parameter changed; true at first."""
        if self._tables and self._numbers == self._look():
            return False
        self._tables = [table for module in root.modules() for table in (module._modules, module._parameters)]
        self._numbers = self._look()
        return True

    def _look(self) -> list[int]:
        return list(map(id, chain.from_iterable(map(dict.values, self._tables))))


def sorted_by_ranks(
    weights: Iterable[Fp8Weight],
    scales: Sequence[DelayedScale],
    held: Sequence[Shard],
    meshes: Sequence[DeviceMesh] = (),
) -> list[SyncGroup]:
    """Group weights and delayed scales by the ranks that agree.

    Delayed scales of a layer join the ranks of its weight.

    Args:
        weights: Weights.
        scales: Delayed scales of the same model.
        held: All of its parameters that FSDP2 shards.
        meshes: Those of parameters that something else distributes, tensor parallelism for example.
    """
    groups: dict[dist.ProcessGroup | None, SyncGroup] = {}

    def of(ranks: dist.ProcessGroup | None) -> SyncGroup:
        return groups.setdefault(ranks, SyncGroup(ranks))

    for weight in weights:
        # delayed scaling combines the observations of all ranks with a copy: then weights join these, for one reduction
        of(weight.group(replicas=bool(scales))).weights.append(weight)
    of_scale = {id(scale): shard for shard in held for scale in shard.module.children()}
    largest = max(held, key=lambda shard: len(shard.peers(replicas=True)), default=None)
    for scale in scales:
        # all ranks, for layers that FSDP2 ignores
        shard = of_scale.get(id(scale), largest)
        of(_all_of(meshes) if shard is None else shard.group(replicas=True)).scales.append(scale)
    return sorted(groups.values(), key=lambda group: _order(group.ranks))


def _all_of(meshes: Sequence[DeviceMesh]) -> dist.ProcessGroup | None:
    """Return all ranks of the largest mesh; None without any."""
    mesh = max(meshes, key=lambda mesh: mesh.size(), default=None)
    return (
        None if mesh is None else group_of_ranks(ranks_along(mesh, [True] * mesh.ndim), mesh.get_group(mesh.ndim - 1))
    )


def _order(ranks: dist.ProcessGroup | None) -> tuple[int, list[int]]:
    """Return a sort key, largest groups first, equal on all ranks."""
    members = [] if ranks is None else sorted(dist.get_process_group_ranks(ranks))
    return -len(members), members
