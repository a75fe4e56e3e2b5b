"""`Member`: one FP8 weight of a synchronization: with which ranks it agrees, its keys, its flags, what follows."""

from collections.abc import Iterable

import torch
import torch.distributed as dist

from fp8_common import Fp8Error
from fp8_common.torch.plugin import fsdp
from fp8_torch_fsdp._weight_state import WeightState


class Member:
    """One FP8 weight of a plan: FSDP2's view of it and, as of the last `look`, its shard and what is known about it.

    Args:
        param: The parameter.

    Attributes:
        param: The parameter.
        device: Where it is gathered, and where ranks talk about it.
        dtype: The dtype of its shard, which stays.
        geometry: Which part of the weight this rank holds.
        shard: The plain local tensor.
        state: What is known about the shard that the parameter holds now; an assigning load brings another one.
        stale: Whether the shard has changed since the last synchronization.
        unsure: Whether it has, and somebody held an alias, so that an edit besides would leave no trace.
    """

    __slots__ = ("device", "dtype", "geometry", "param", "shard", "stale", "state", "unsure")

    def __init__(self, param: fsdp.ShardedParam) -> None:
        self.param, self.device, self.geometry = param, param.device, param.geometry
        self.dtype: torch.dtype = param.local.dtype
        self.look()

    def look(self) -> None:
        """Take the shard as it is now.

        Raises:
            Fp8Error: It has another dtype than before.
        """
        local = self.param.local
        self.shard: torch.Tensor = local._data
        if self.shard.dtype != self.dtype:
            # FSDP2 copies parameters beside FP8 weights as bytes into buffers of the old dtype, without a check.
            raise Fp8Error(
                f"{self.param.name} became {self.shard.dtype} after it was gathered as {self.dtype}: FSDP2 keeps "
                "buffers of the first dtype. Call model.to(dtype) before the first forward, or build the model anew "
                "and load its state dict."
            )
        self.state: WeightState = local._state
        changes = self.state.changes
        doubt = changes.take_doubt()
        self.unsure = doubt and changes.are_new(self.shard)
        if doubt and not self.unsure:
            # Casts and compares, which waits for a GPU: only for weights that were lent to somebody, and that no
            # counter shows as changed.
            with torch.no_grad(), torch.inference_mode(False):
                if self.state.differs(self.shard, self.param.process_group.size()):
                    changes.mark(edit=True)
        self.stale: bool = changes.are_new(self.shard)

    @property
    def reduced(self) -> bool:
        """Whether its scales are combined over ranks."""
        return self.state.keys is not None and self.state.keys.numel() > 0

    def renew(self, scale: torch.Tensor | None, step: int) -> None:
        """Take over the scales that were agreed on: the cast is due, and what FSDP2 still holds is let go.

        Without a reduction the other ranks do not know of the change, and FSDP2 keeps what it holds.
        """
        # FSDP2 may hold codes of before: with reshard_after_forward=False, or after `unshard()`.
        if self.reduced and self.param.group.is_unsharded:
            self.param.group.reshard()
        state = self.state
        state.scale, state.wire, state.synced_at = scale, None, step
        state.changes.cover(self.shard)


def by_process_group(members: Iterable[Member], *, replicas: bool) -> list[tuple[dist.ProcessGroup, list[Member]]]:
    """Return the weights by the ranks that agree on their scales, in as few groups as possible, largest first.

    A scale is agreed on by the ranks that hold parts of the weight: FSDP2's shards, times those of tensor parallelism.
    Weights of fewer ranks join a larger group whose other ranks hold copies, so nothing changes. Ranks outside of the
    weight's mesh hold no copies: they may have an expert of their own in its place.

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
    if member.state.strategy.scales_each_part:
        return tuple(sorted(dist.get_process_group_ranks(member.param.process_group)))
    return member.param.peers(replicas=replicas)


def _may_join(member: Member, larger: tuple[int, ...], own: tuple[int, ...]) -> bool:
    if larger == own:
        return True
    return not member.state.strategy.scales_each_part and set(larger) <= set(member.param.peers(replicas=True))


def flags_of(members: list[Member]) -> torch.Tensor:
    """Return int32 [4 * n]: changed, unchanged, edited, not edited, for each weight.

    A rank with an empty shard has a say in the first alone; one that is unsure does not say that nothing was edited.
    """
    changed, unchanged, edited, untouched = [], [], [], []
    for member in members:
        changes = member.state.changes
        # MAX of "changed" and of "unchanged" are both 1 where ranks differ. A shard without elements is never written
        # to.
        has_say = member.shard.numel() > 0 and changes.seen is not None
        edit = has_say and member.stale and changes.are_edits(member.shard)
        changed.append(member.stale)
        unchanged.append(has_say and not member.stale)
        edited.append(edit)
        untouched.append(has_say and not edit and not member.unsure)
    return torch.tensor([changed, unchanged, edited, untouched], dtype=torch.int32).reshape(-1)


def names_of_partial_changes(members: list[Member], flags: torch.Tensor, *, steps: bool) -> list[str]:
    """Return the names of weights that were edited on some ranks and not on others.

    Args:
        members: The weights.
        flags: int32 [4, n], from `flags_of`, combined over ranks.
        steps: Optimizer steps count as edits.
    """
    made, left = (flags[:2] if steps else flags[2:]).tolist()
    return [member.param.name for member, here, there in zip(members, made, left, strict=True) if here and there]
