"""`Member`: one FP8 weight of a synchronization: with which ranks it agrees, its keys, its flags, what follows."""

import dataclasses
from collections.abc import Iterable

import torch
import torch.distributed as dist

from fp8_common.torch.plugin import fsdp
from fp8_torch_fsdp._strategies import Strategy
from fp8_torch_fsdp._weight_state import WeightState


@dataclasses.dataclass(kw_only=True, slots=True)
class Member:
    """One FP8 weight of a plan: FSDP2's view of it and, through its shard, its state."""

    param: fsdp.ShardedParam

    @property
    def shard(self) -> torch.Tensor:
        """The plain local tensor."""
        return self.param.local._data

    @property
    def state(self) -> WeightState:
        """The state of the shard that the parameter holds now; an assigning load brings another one."""
        return self.param.local._state

    @property
    def strategy(self) -> Strategy:
        """How the weight is scaled."""
        return self.state.strategy

    @property
    def may_be_stale(self) -> bool:
        """Whether the shard has, or could have, changed since the last synchronization."""
        return self.state.changes.may_be_new(self.shard)

    @property
    def reduced(self) -> bool:
        """Whether its scales are combined over ranks."""
        return self.state.keys is not None and self.state.keys.numel() > 0

    def refresh_keys(self) -> None:
        """Compute the keys of this rank's part again if it may have changed."""
        if self.state.keys is None or self.may_be_stale:
            self.keep_keys(self.strategy.local_keys(self.shard, self.state.geometry))

    def keep_keys(self, keys: torch.Tensor) -> None:
        """Remember the keys of this rank's part where the ranks will combine them."""
        self.state.keys = keys.to(self.param.device, non_blocking=True)

    def renew(self, scale: torch.Tensor | None, step: int) -> None:
        """Take over the scales that were agreed on: the cast is due, and what FSDP2 still holds is let go."""
        if self.param.group.is_unsharded:
            self.param.group.reshard()
        state = self.state
        state.scale, state.wire, state.synced_at = scale, None, step
        state.changes.cover(self.shard)


def by_process_group(members: Iterable[Member], *, replicas: bool) -> list[tuple[dist.ProcessGroup, list[Member]]]:
    """Return the weights by the ranks that agree on their scales, in as few groups as possible, largest first.

    A scale is agreed on by the ranks that hold parts of the weight: FSDP2's shards, times those of tensor parallelism.
    Weights of fewer ranks join a larger group that contains them; its other ranks hold copies, so nothing changes.

    Args:
        members: The weights, in the order that all ranks share.
        replicas: Include ranks that hold copies (HSDP): delayed scaling combines what all of them observe.
    """
    groups: dict[tuple[int, ...], tuple[dist.ProcessGroup, list[Member]]] = {}
    ranked = [(_peers(member, replicas), member) for member in members]
    for ranks, member in ranked:
        larger = [r for r, _ in ranked if set(ranks) <= set(r) and _may_join(member, r, ranks)]
        chosen = max(larger, key=len)
        if chosen not in groups:
            groups[chosen] = (fsdp.group_of(chosen, member.param.process_group), [])
        groups[chosen][1].append(member)
    return [groups[ranks] for ranks in sorted(groups, key=len, reverse=True)]


def _peers(member: Member, replicas: bool) -> tuple[int, ...]:
    if member.strategy.scales_each_part:
        return tuple(sorted(dist.get_process_group_ranks(member.param.process_group)))
    return member.param.peers(replicas=replicas)


def _may_join(member: Member, larger: tuple[int, ...], own: tuple[int, ...]) -> bool:
    return larger == own or not member.strategy.scales_each_part


def flags_of(members: list[Member]) -> torch.Tensor:
    """Return int32 [3 * n]: changed, edited, untouched for each weight; a rank with an empty shard has no say."""
    edited = [member.state.changes.are_edits(member.shard) for member in members]
    present = [member.shard.numel() > 0 and member.state.changes.seen is not None for member in members]
    rows = [
        [member.may_be_stale for member in members],
        [e and p for e, p in zip(edited, present, strict=True)],
        [not e and p for e, p in zip(edited, present, strict=True)],
    ]
    return torch.tensor(rows, dtype=torch.int32).reshape(-1)


def names_of_partial_edits(members: list[Member], flags: torch.Tensor) -> list[str]:
    """Return the weights that `flags` [3, n], combined over ranks, shows edited here and untouched there."""
    _, edited, untouched = flags.tolist()
    return [m.param.name for m, e, u in zip(members, edited, untouched, strict=True) if e and u]
