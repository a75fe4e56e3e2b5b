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
    """Weights and delayed scales that the same ranks share.

    Attributes:
        ranks: Process group of the ranks; None for this rank alone.
        weights: Weights that the ranks gather in FP8.
        scales: Delayed scales.
        needs_roll: Whether the amax histories roll at the next synchronization: an optimizer step ended since the last.
    """

    ranks: dist.ProcessGroup | None
    weights: list[Fp8Weight] = dataclasses.field(default_factory=list)
    scales: list[DelayedScale] = dataclasses.field(default_factory=list)
    needs_roll: bool = False


class ModelStructure:
    """Modules and parameters of a model at the last check.

    A check compares ids of objects, which takes microseconds. It does not keep modules and parameters alive.
    """

    def __init__(self) -> None:
        self._tables: list[dict] = []
        self._ids: list[int] = []

    def has_changed(self, root: nn.Module) -> bool:
        """Return whether a module or parameter was replaced since the last check.

        The first check returns True.
        """
        if self._tables and self._ids == self._current_ids():
            return False
        self._tables = [table for module in root.modules() for table in (module._modules, module._parameters)]
        self._ids = self._current_ids()
        return True

    def _current_ids(self) -> list[int]:
        return list(map(id, chain.from_iterable(map(dict.values, self._tables))))


def sorted_by_ranks(
    weights: Iterable[Fp8Weight],
    scales: Sequence[DelayedScale],
    shards: Sequence[Shard],
    meshes: Sequence[DeviceMesh] = (),
) -> list[SyncGroup]:
    """Group weights and delayed scales by the ranks that share them.

    The delayed scales of a layer are shared by the ranks that hold parts or copies of its weight.

    Args:
        weights: Weights that FSDP2 gathers in FP8.
        scales: Delayed scales of the same model.
        shards: All parameters of the model that FSDP2 shards.
        meshes: Meshes of parameters that are distributed otherwise, for example by tensor parallelism.

    Returns:
        The groups in the same order on all ranks, largest first.
    """
    groups: dict[dist.ProcessGroup | None, SyncGroup] = {}

    def of(ranks: dist.ProcessGroup | None) -> SyncGroup:
        return groups.setdefault(ranks, SyncGroup(ranks))

    for weight in weights:
        # Delayed scales are combined over replicas, too. Weights then use the same ranks, for a single all-reduce.
        of(weight.group(replicas=bool(scales))).weights.append(weight)
    of_scale = {id(scale): shard for shard in shards for scale in shard.module.children()}
    largest = max(shards, key=lambda shard: len(shard.peers(replicas=True)), default=None)
    for scale in scales:
        # Layers that FSDP2 ignores are shared by all ranks.
        shard = of_scale.get(id(scale), largest)
        of(_all_of(meshes) if shard is None else shard.group(replicas=True)).scales.append(scale)
    return sorted(groups.values(), key=lambda group: _order(group.ranks))


def _all_of(meshes: Sequence[DeviceMesh]) -> dist.ProcessGroup | None:
    """Return all ranks of the largest mesh, or None without meshes."""
    mesh = max(meshes, key=lambda mesh: mesh.size(), default=None)
    return (
        None if mesh is None else group_of_ranks(ranks_along(mesh, [True] * mesh.ndim), mesh.get_group(mesh.ndim - 1))
    )


def _order(ranks: dist.ProcessGroup | None) -> tuple[int, list[int]]:
    """Return a sort key equal on all ranks, largest groups first."""
    members = [] if ranks is None else sorted(dist.get_process_group_ranks(ranks))
    return -len(members), members
