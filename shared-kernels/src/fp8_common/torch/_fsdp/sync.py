"""Decides when the scales under an FSDP root are agreed on: one all-reduce per root forward, for everything.

The reduction runs in a hook before the root's own pre-forward, on every rank and whether or not this rank's weights
changed: a rank that skipped an optimizer step cannot leave the others waiting, and a weight that was edited on some
ranks only is found by all of them. Only inside a gradient accumulation window (`set_requires_gradient_sync(False)`)
is it left out, because weights do not change there. Weights whose scales never leave their rank take no part.
"""

import logging
import weakref

import torch
import torch.distributed as dist
from torch import nn

from fp8_common._errors import Fp8Error, Fp8StaleError
from fp8_common.torch import _delayed as delayed
from fp8_common.torch._fsdp import compat
from fp8_common.torch._fsdp.launches import cast_together, refresh_keys, scales_together
from fp8_common.torch._fsdp.member import Member, by_process_group, flags_of, names_of_partial_edits

logger = logging.getLogger(__name__)


class SyncPlan:
    """The FP8 weights and delayed scales under one FSDP root, and what keeps them equal on all ranks.

    Attributes:
        members: The weights, in the order that all ranks share.
        reductions: Number of all-reduces issued so far on this rank.
    """

    def __init__(self, root: nn.Module, cls: type) -> None:
        """Collect the weights whose shard is a `cls` and hook the root's forward."""
        self._root = weakref.ref(root)
        params = compat.sharded_params(root)
        self.members = [Member(param=param) for param in params if isinstance(param.local, cls)]
        self.scales = delayed.delayed_scales(root)
        _refuse_partial_resharding(self.members)
        self._groups = by_process_group(self.members, replicas=bool(self.scales))
        self.reductions = 0
        self._accumulating = not compat.gradient_sync_enabled(root)
        self._explicit = False
        self._unchecked: list[tuple[list[Member], torch.Tensor]] = []
        self._link()
        root.register_forward_pre_hook(torch._dynamo.disable(self._before_root_forward), prepend=True)
        logger.info("FP8 all-gather for %d weights under one FSDP root.", len(self.members))

    def _before_root_forward(self, module: nn.Module, args: object) -> None:
        was_accumulating, self._accumulating = self._accumulating, not compat.gradient_sync_enabled(module)
        was_explicit, self._explicit = self._explicit, False
        changed = any(member.may_be_stale for member in self.members)
        if changed or not (was_accumulating or was_explicit):
            self.synchronize(record=False)
        if module.training and torch.is_grad_enabled():
            self._observe_weights()
        if not was_accumulating:
            self._gather_again_without_keys()

    def synchronize_now(self, *, roll: bool) -> None:
        """Synchronize on request, after a step: the next root forward then finds nothing to do."""
        self.synchronize(roll=roll, record=False)
        self._explicit = True

    @torch.no_grad()
    def synchronize(self, *, record: bool | None = None, roll: bool = False) -> None:
        """Agree on every scale with one MAX all-reduce per process group. Every rank of the root must call it.

        Args:
            record: Whether delayed scaling observes the weights; by default, whether the root is in training mode.
            roll: Make the next delayed scales even if no optimizer step was made since the last time.

        Raises:
            Fp8StaleError: A weight was edited on some ranks only; raised on all ranks, naming it.
        """
        root = self._root()
        record = root is not None and root.training if record is None else record
        with torch.inference_mode(False):
            self._raise_for_partial_edits()
            self._link()
            refresh_keys(self.members)
            for index, (process_group, members) in enumerate(self._groups):
                # the first group, the largest, carries the delayed scales
                self._synchronize_group(process_group, members, self.scales if index == 0 else [], roll)
            for member in self.members:
                if not member.reduced and member.may_be_stale:
                    member.renew(member.state.scale)
            cast_together(self.members)
            if record:
                self._observe_weights()

    @torch.no_grad()
    def _observe_weights(self) -> None:
        """Let delayed scaling record the amax of the weights that training uses now."""
        for member in self.members:
            if member.state.agreed is not None:
                member.state.strategy.record(member.state.agreed)

    def _synchronize_group(
        self, process_group: dist.ProcessGroup, members: list[Member], scales: list[delayed.DelayedScale], roll: bool
    ) -> None:
        members = [member for member in members if member.reduced]
        if not members and not scales:
            return
        parts = self._payload(members, scales, roll)
        payload = torch.cat(parts)
        if process_group.size() > 1:
            dist.all_reduce(payload, op=dist.ReduceOp.MAX, group=process_group)
            self.reductions += 1
        *keys, flags, observed, due = payload.split([part.numel() for part in parts])
        if scales:
            # where any rank made a step; without one, the observations of this rank stay for later
            delayed.roll(scales, observed, due[0] > 0)
        changed = self._changed(members, flags.view(3, -1)) if members else []
        renewed = [pair for pair, is_new in zip(zip(members, keys, strict=True), changed, strict=True) if is_new]
        for member, own in zip(members, keys, strict=True):
            member.state.agreed = own
        for (member, _), scale in zip(renewed, scales_together(renewed), strict=True):
            member.renew(scale)

    def _payload(self, members: list[Member], scales: list[delayed.DelayedScale], roll: bool) -> list[torch.Tensor]:
        """Return int32 parts: the keys of each weight, their flags, the keys of delayed scales, whether to roll."""
        device = members[0].param.device if members else scales[0].key.device
        nothing = torch.zeros(0, dtype=torch.int32, device=device)
        return [
            *(member.state.known_keys for member in members),
            flags_of(members).to(device, non_blocking=True),
            delayed.stack_keys(scales) if scales else nothing,
            delayed.due(scales, roll) if scales else nothing,
        ]

    def _changed(self, members: list[Member], flags: torch.Tensor) -> list[bool]:
        """Return which weights changed on any rank; look for partial edits now, or later if that would stall a GPU."""
        if all(member.may_be_stale for member in members) and flags.device.type != "cpu":
            self._unchecked.append((members, flags.to("cpu", non_blocking=True)))
            return [True] * len(members)
        self._unchecked.append((members, flags.cpu()))
        self._raise_for_partial_edits()
        return flags[0].bool().tolist()

    def _raise_for_partial_edits(self) -> None:
        unchecked, self._unchecked = self._unchecked, []
        names = [name for members, flags in unchecked for name in names_of_partial_edits(members, flags)]
        if names:
            raise Fp8StaleError(
                f"FP8 weights were changed in place on some ranks only, outside of an optimizer step: "
                f"{', '.join(names)}. Make the same change on every rank that holds a part of them."
            )

    def _gather_again_without_keys(self) -> None:
        """Let go of weights that FSDP2 kept gathered: without a reduction no rank knows of another's changes."""
        for member in self.members:
            if not member.reduced and member.param.group.is_unsharded:
                member.param.group.reshard()

    def _link(self) -> None:
        """Tell states that do not know it yet, new ones after an assigning load, where they belong."""
        for member in self.members:
            if member.state.plan() is not self:
                member.link(weakref.ref(self))


def _refuse_partial_resharding(members: list[Member]) -> None:
    names = [member.param.name for member in members if member.param.reshards_to_part_of_the_mesh]
    if names:
        raise Fp8Error(
            f"reshard_after_forward with an integer does not work for weights gathered in FP8 "
            f"({', '.join(names)}): FSDP2 supports True and False for them. To keep weights within a node, "
            "shard over a two-dimensional mesh (HSDP) instead."
        )
