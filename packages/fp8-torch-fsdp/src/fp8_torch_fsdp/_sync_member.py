"""`Member`: one FP8 weight of a synchronization: with which ranks it agrees, its flags, keys, scales and cast.

On a GPU a launch per weight costs more than the work. Weights whose strategy scales whole tensors share one operator
for all amax and one for all casts of a format, each a single launch there; others go one by one.
"""

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist

from fp8_common import CastRecipe, Format, Fp8Error
from fp8_common.torch.plugin import dispatch, foreach, fsdp
from fp8_torch_fsdp._delayed import DelayedScale, current_together
from fp8_torch_fsdp._strategies import delayed_of
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
        reduced: Whether its scales are combined over ranks, known once it has keys.
        stale: Whether the shard has changed since the last synchronization.
        unsure: Whether it has, and somebody held an alias, so that an edit besides would leave no trace.
    """

    __slots__ = ("device", "dtype", "geometry", "param", "reduced", "shard", "stale", "state", "unsure")

    def __init__(self, param: fsdp.ShardedParam) -> None:
        self.param, self.device, self.geometry = param, param.device, param.geometry
        self.dtype: torch.dtype = param.local.dtype
        self.reduced = False
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


def refresh_keys(members: Sequence[Member]) -> None:
    """Compute the keys of weights again that may have changed, and put them where the ranks combine them."""
    together: dict[torch.device, list[Member]] = {}
    for member in members:
        # Keys of a weight that did not change are kept: the ranks combine them again in every reduction, without a pass
        # over the data.
        if member.state.keys is not None and not member.stale:
            continue
        strategy = member.state.strategy
        if strategy.shares_launches:
            together.setdefault(member.shard.device, []).append(member)
        else:
            keys = strategy.local_keys(member.shard, member.geometry)
            # Under CPU offload the shard is on the CPU and the ranks talk on the GPU.
            member.state.keys = keys.to(member.device, non_blocking=True)
    for group in together.values():
        keys = foreach.amax_keys([member.shard for member in group])
        for member, key in zip(group, keys.split(1), strict=True):
            member.state.keys = key.to(member.device, non_blocking=True)
    for member in members:
        member.reduced = member.state.known_keys.numel() > 0


def scales_together(renewed: list[tuple[Member, torch.Tensor]]) -> list[torch.Tensor | None]:
    """Return the scales of weights from their reduced keys; those with one key each, all at once."""
    scales: list[torch.Tensor | None] = []
    alike: dict[CastRecipe, list[int]] = {}
    in_use: dict[int, DelayedScale] = {}
    for index, (member, keys) in enumerate(renewed):
        strategy = member.state.strategy
        known, together = delayed_of(strategy), strategy.scale_follows_from_key
        if known is not None:
            in_use[index] = known
        elif together:
            alike.setdefault(strategy.cast, []).append(index)
        # None holds the place until the loops below.
        alone = known is None and not together
        scales.append(strategy.scale_from_keys(keys, member.geometry) if alone else None)
    for cast, indices in alike.items():
        amax = torch.cat([renewed[i][1] for i in indices]).view(torch.float32)
        fmt = renewed[indices[0]][0].state.strategy.layout.fmt
        for i, scale in zip(indices, dispatch.scale_from_amax(amax, fmt, cast.policy).unbind(), strict=True):
            scales[i] = scale
    if in_use:
        found = current_together(list(in_use.values()), [renewed[i][1] for i in in_use])
        for i, scale in zip(in_use, found, strict=True):
            member = renewed[i][0]
            shape = member.state.strategy.layout.shape(member.geometry.full_shape)
            scales[i] = scale if scale.shape == shape else scale.view(shape)
    return scales


def cast_together(members: Iterable[Member]) -> None:
    """Make the buffers of weights that keep them and have none; others are cast when they are gathered."""
    together: dict[tuple[Format, torch.device], list[Member]] = {}
    for member in members:
        strategy = member.state.strategy
        here = member.shard.device == member.device  # else FSDP2 uploads it for each gather: cast then
        if strategy.shares_launches and here and member.state.wire is None:
            together.setdefault((strategy.layout.fmt, member.shard.device), []).append(member)
    for (fmt, _), group in together.items():
        scales = torch.stack([member.state.agreed_scale for member in group])
        codes = foreach.cast([member.shard for member in group], scales, fmt)
        for member, own in zip(group, codes, strict=True):
            state = member.state
            state.wire = (fsdp.pad_rows(own, state.geometry.padded_shape),), state.scale
            # `wire` was filled without `to_wire`, which counts the others
            state.casts += 1
