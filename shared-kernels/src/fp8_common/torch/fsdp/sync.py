"""Decides when the scales of all FP8 weights under an FSDP root are agreed on: one all-reduce per root forward.

The reduction runs in a hook before the root's own pre-forward, on every rank and whether or not this rank's weights
changed: a rank that skipped an optimizer step cannot leave the others waiting, and a weight that was edited on some
ranks only is found by all of them. Only inside a gradient accumulation window (`set_requires_gradient_sync(False)`)
is it left out, because weights do not change there.
"""

import dataclasses
import logging
import weakref
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn

from fp8_common.errors import Fp8StaleError
from fp8_common.torch.fsdp import compat
from fp8_common.torch.fsdp.launches import cast_together, refresh_keys
from fp8_common.torch.fsdp.weight_state import WeightState

logger = logging.getLogger(__name__)


@dataclasses.dataclass(kw_only=True, slots=True)
class Member:
    """One FP8 weight of a plan: FSDP2's view of it and, through its shard, its state."""

    param: compat.ShardedParam

    @property
    def shard(self) -> torch.Tensor:
        """The plain local tensor."""
        return self.param.local._data

    @property
    def state(self) -> WeightState:
        """The state of the shard that the parameter holds now."""
        return self.param.local._state


class SyncPlan:
    """The FP8 weights under one FSDP root, and the all-reduce that keeps their scales equal on all ranks.

    Attributes:
        reductions: Number of all-reduces issued so far on this rank.
    """

    def __init__(self, root: nn.Module, cls: type) -> None:
        """Collect the weights whose shard is a `cls` and hook the root's forward."""
        self._root = weakref.ref(root)
        params = compat.sharded_params(root)
        self.members = [Member(param=param) for param in params if isinstance(param.local, cls)]
        self.reductions = 0
        self._accumulating = not compat.gradient_sync_enabled(root)
        self._unchecked: list[tuple[list[Member], torch.Tensor]] = []
        self._link()
        root.register_forward_pre_hook(torch._dynamo.disable(self._before_root_forward), prepend=True)
        logger.info("FP8 all-gather for %d weights under one FSDP root.", len(self.members))

    def _before_root_forward(self, module: nn.Module, args: object) -> None:
        was_accumulating, self._accumulating = self._accumulating, not compat.gradient_sync_enabled(module)
        if not was_accumulating or self._any_dirty():
            self.synchronize()

    def _any_dirty(self) -> bool:
        return any(member.state.may_be_stale(member.shard) for member in self.members)

    def _link(self) -> None:
        """Tell states, new ones too (after an assigning load), where they belong."""
        for member in self.members:
            state = member.state
            state.plan, state.name = weakref.ref(self), member.param.name
            state.full_shape, state.padded_shape = member.param.full_shape, member.param.padded_shape

    @torch.no_grad()
    def synchronize(self) -> None:
        """Agree on every scale with one MAX all-reduce per process group. Every rank of the root must call it.

        Raises:
            Fp8StaleError: A weight was edited on some ranks only; raised on all ranks, naming it.
        """
        with torch.inference_mode(False):
            self._raise_for_partial_edits()
            self._link()
            for group in _by_process_group(self.members):
                self._synchronize_group(group)

    def _synchronize_group(self, members: list[Member]) -> None:
        dirty = [member.state.may_be_stale(member.shard) for member in members]
        refresh_keys([m for m, d in zip(members, dirty, strict=True) if d or m.state.keys is None])
        sizes = [member.state.keys.numel() for member in members]
        flags = _flags(members, dirty)
        payload = torch.cat([*(member.state.keys for member in members), flags])
        process_group = members[0].param.process_group
        if process_group.size() > 1:
            dist.all_reduce(payload, op=dist.ReduceOp.MAX, group=process_group)
            self.reductions += 1
        *keys, reduced = payload.split([*sizes, flags.numel()])
        changed = self._check_flags(members, dirty, reduced.view(3, -1))
        renewed = [(member, own) for member, own, is_new in zip(members, keys, changed, strict=True) if is_new]
        for member, own_keys in renewed:
            self._renew(member, own_keys)
        cast_together([member for member, _ in renewed])

    def _check_flags(self, members: list[Member], dirty: list[bool], flags: torch.Tensor) -> Sequence[bool]:
        """Return which weights changed on any rank; look for partial edits now, or later if that would stall a GPU."""
        if all(dirty) and flags.device.type != "cpu":
            self._unchecked.append((members, flags.to("cpu", non_blocking=True)))
            return dirty
        self._unchecked.append((members, flags.cpu()))
        self._raise_for_partial_edits()
        return flags[0].bool().tolist()

    def _renew(self, member: Member, keys: torch.Tensor) -> None:
        if member.param.group.is_unsharded:
            member.param.group.reshard()
        state = member.state
        state.scale, state.wire = state.strategy.scale_from_keys(keys), None
        state.mark_synced(member.shard)

    def _raise_for_partial_edits(self) -> None:
        unchecked, self._unchecked = self._unchecked, []
        for members, flags in unchecked:
            _, edited, untouched = flags.tolist()
            names = [m.param.name for m, e, u in zip(members, edited, untouched, strict=True) if e and u]
            if names:
                raise Fp8StaleError(
                    f"FP8 weights were changed in place on some ranks only, outside of an optimizer step: "
                    f"{', '.join(names)}. Make the same change on every rank that holds a part of them."
                )


def _by_process_group(members: list[Member]) -> list[list[Member]]:
    groups: dict[str, list[Member]] = {}
    for member in members:
        groups.setdefault(member.param.process_group.group_name, []).append(member)
    return list(groups.values())


def _flags(members: list[Member], dirty: list[bool]) -> torch.Tensor:
    """Return int32 rows [changed, edited, untouched] per weight; a rank with an empty shard has no say."""
    edited = [member.state.was_edited(member.shard) for member in members]
    present = [member.shard.numel() > 0 and member.state.seen is not None for member in members]
    rows = [
        dirty,
        [e and p for e, p in zip(edited, present, strict=True)],
        [not e and p for e, p in zip(edited, present, strict=True)],
    ]
    device = members[0].state.keys.device
    return torch.tensor(rows, dtype=torch.int32).reshape(-1).to(device, non_blocking=True)
