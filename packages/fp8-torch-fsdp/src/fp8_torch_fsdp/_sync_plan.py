"""`SyncPlan`: agrees on all scales under an FSDP root, in one all-reduce per root forward.

The reduction runs in a hook before the root's own pre-forward, on every rank and whether or not this rank's weights
changed: a rank that skipped an optimizer step cannot leave the others waiting, and a weight that was edited on some
ranks only is found by all of them. Gathers inside of that forward and of its backward never reduce; those of
`unshard()` and of a submodule that is called alone always do. Whether ranks reduce thus never depends on what one of
them did. Weights whose scales never leave their rank take no part.
"""

import contextlib
import logging
import weakref
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from fp8_common import Fp8Error, Fp8StaleError
from fp8_common.torch.plugin import fsdp, hooks, max_over_ranks
from fp8_torch_fsdp import _delayed as delayed
from fp8_torch_fsdp._delayed import DelayedScale, delayed_scales
from fp8_torch_fsdp._scale_plan import ScalePlan, scales_by_group
from fp8_torch_fsdp._strategies import delayed_of
from fp8_torch_fsdp._sync_member import (
    Member,
    by_process_group,
    cast_together,
    flags_of,
    names_of_partial_changes,
    refresh_keys,
    scales_together,
)
from fp8_torch_fsdp._weight_state import WeightState

logger = logging.getLogger(__name__)


class _Unchecked(NamedTuple):
    """Flags that nobody has looked at for partial edits yet.

    Attributes:
        members: The weights.
        flags: Combined over ranks.
        arrived: Where they are still on their way.
        steps: Steps count as edits: ranks without a change did not wait to hear of one.
    """

    members: list[Member]
    flags: torch.Tensor
    arrived: "torch.cuda.Event | None"
    steps: bool


class SyncPlan(ScalePlan):
    """The FP8 weights and delayed scales under one FSDP root, and what keeps them equal on all ranks.

    Attributes:
        members: The weights, in the order that all ranks share.
    """

    def __init__(self, root: nn.Module, cls: type) -> None:
        """Collect the weights whose shard is a `cls` and hook the root's forward."""
        super().__init__(root)
        self.members = [Member(param) for param in fsdp.sharded_params(root) if isinstance(param.local, cls)]
        scales = delayed_scales(root)
        _refuse(self.members)
        _mark_unsharded(root)
        self._groups = by_process_group(self.members, replicas=bool(scales))
        self._take_by_group(root, scales)
        # As of the last forward or backward: inside of gradient accumulation no optimizer step is due (`quiet` below).
        self._accumulating = not fsdp.gradient_sync_enabled(root)
        self._explicit = False
        # Whether the last forward was without gradients.
        self._evaluated = False
        # Reversed, so that the first weight of each group of FSDP2 is the last one written.
        firsts = {id(member.param.group): member.param.name for member in reversed(self.members)}
        self._first_of_groups = set(firsts.values())
        self._unchecked: list[_Unchecked] = []
        self._link()
        # prepend: before the hook of FSDP2, which starts the first gather
        root.register_forward_pre_hook(torch._dynamo.disable(self._before_root_forward), prepend=True)
        root.register_forward_hook(torch._dynamo.disable(self._after_root_forward))
        logger.info("FP8 all-gather for %d weights under one FSDP root.", len(self.members))

    def _take_by_group(self, root: nn.Module, scales: list[DelayedScale]) -> None:
        """Own the delayed scales; those of a layer are shared by the ranks that have its weight."""
        self._scales_of = scales_by_group(scales, fsdp.sharded_params(root), self._groups[0][0])
        # `shared` is set for each below: the group of a layer may be smaller than that of the root.
        self.take(scales, shared=False)
        for group, own in self._scales_of.items():
            for scale in own:
                scale.shared = group.size() > 1
        # Groups in which nothing but delayed scales has to be agreed on follow the groups of weights, on all ranks
        # alike.
        known = [group for group, _ in self._groups]
        self._groups += [(group, []) for group in self._scales_of if group not in known]

    def _before_root_forward(self, module: nn.Module, args: object) -> None:
        fsdp.before_gathers(module, self._prepare_gathers)

    def _prepare_gathers(self, module: nn.Module) -> None:
        # First: what is written to weights after a step that raised is an edit again.
        self.steps.forget_interrupted()
        # The value of before says whether a step can have come between the last backward and this forward.
        was_accumulating, self._accumulating = self._accumulating, not fsdp.gradient_sync_enabled(module)
        was_explicit, self._explicit = self._explicit, False
        # Nobody steps between two forwards of an evaluation.
        evaluates = self._evaluated and not torch.is_grad_enabled()
        for member in self.members:
            member.look()
        self._synchronize(roll=False, quiet=was_accumulating or was_explicit or evaluates)
        if not was_accumulating:
            self._gather_again_without_keys()

    def _after_root_forward(self, module: nn.Module, args: object, output: object) -> None:
        self._evaluated = not torch.is_grad_enabled()
        if self._evaluated:
            return
        observes = bool(self.scales) and module.training
        if observes:
            self._observe_weights()
        # Without scales to combine the hook is still needed while gradients are accumulated, to see whether the next
        # backward ends that.
        if (observes and self._shares_scales) or self._accumulating:
            self._combine_after_backward(
                output, [(self._scales_of.get(group, []), [group]) for group, _ in self._groups]
            )

    def _backward_begins(self) -> bool:
        """Note whether this backward reduces gradients: the flag may have been set since the forward."""
        root = self._root()
        self._accumulating = root is not None and not fsdp.gradient_sync_enabled(root)
        return self._shares_scales and not self._accumulating

    @property
    def _shares_scales(self) -> bool:
        return any(scale.shared for scale in self.scales)

    def is_due(self, state: WeightState) -> bool:
        """Return whether a gather of this weight is one that synchronizes first, which all ranks answer alike.

        Those in the root's forward and in a backward are not; others are, once for all weights that are gathered
        together.
        """
        root = self._root()
        inside = root is None or fsdp.in_backward() or fsdp.in_forward(root)
        return not inside and state.name in self._first_of_groups

    def _before_step(self) -> None:
        """Compare weights of which aliases were lent: afterwards nothing tells what was no part of the step."""
        for member in self.members:
            member.look()

    def _after_step(self, optimizer: Optimizer) -> None:
        """Mark the weights that an optimizer trains: a compiled step writes to them unseen."""
        super()._after_step(optimizer)
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                state = getattr(getattr(parameter, "_local_tensor", parameter), "_state", None)
                # An optimizer leaves parameters without a gradient alone, so a frozen weight keeps its codes.
                if state is not None and state.plan() is self and parameter.grad is not None:
                    state.changes.mark(edit=False)

    def synchronize_now(self, *, roll: bool, group: dist.ProcessGroup | None = None) -> None:
        """Synchronize on request, after a step: the next root forward then finds nothing to do."""
        self.synchronize(roll=roll, record=False)
        self._explicit = True

    def synchronize(self, *, record: bool | None = None, roll: bool = False) -> None:
        """Agree on every scale with one MAX all-reduce per process group. Every rank of the root must call it.

        Args:
            record: Whether delayed scaling observes the weights; by default in the forward of a part of the root that
                is called alone. `unshard()` is no use of a weight, and the root's forward observes at its end.
            roll: Make the next delayed scales even if no optimizer step was made since the last time.

        Raises:
            Fp8StaleError: A weight was edited on some ranks only; raised on all ranks, naming it.
        """
        for member in self.members:
            member.look()
        self._synchronize(roll=roll)
        if self.scales and (self._trains_a_part() if record is None else record):
            self._observe_weights()

    def synchronize_in_gather(self) -> None:
        """Synchronize on the stream of a gather: the first one of the root, or of a part that is called alone."""
        root = self._root()
        # Layers write what they observe on the stream that computes, maybe of a layer that gathers nothing in FP8 and
        # ran before this gather, or runs beside it. Other scales are made and used by gathers alone.
        with fsdp.alone_on_device(root) if self.scales and root is not None else contextlib.nullcontext():
            self.synchronize()

    def _trains_a_part(self) -> bool:
        # whether gradients are enabled cannot be asked: FSDP2 disables them while it gathers
        root = self._root()
        return root is not None and root.training and fsdp.in_any_forward(root) and not fsdp.in_forward(root)

    @torch.no_grad()
    def _synchronize(self, *, roll: bool, quiet: bool = False) -> None:
        """Agree on every scale, of the shards as they were looked at last.

        Args:
            roll: Make the next delayed scales in any case.
            quiet: No step is due, inside of an accumulation window, in an evaluation or after a synchronization on
                request: on a GPU a rank that sees no change does not wait to hear of one elsewhere, which is an error
                instead.
        """
        with torch.inference_mode(False):
            # Before anything is sent: these flags were combined the last time, so all ranks raise here or none does.
            if self._unchecked:
                self._raise_for_partial_edits()
            self._link()
            if self.scales and (self._stepped or roll):
                self._scale_again()
            refresh_keys(self.members)
            for process_group, members in self._groups:
                self._synchronize_group(process_group, members, roll, quiet)
            self._stepped = False
            for member in self.members:
                # No keys, nothing agreed on: the scale is a constant or travels, and only the kept cast is due.
                if member.stale and not member.reduced:
                    member.renew(member.state.scale, self.steps.count)
            cast_together(self.members)

    def _scale_again(self) -> None:
        """Let weights with delayed scaling take the scales that follow a step, those too that it left alone."""
        for member in self.members:
            if delayed_of(member.state.strategy) is not None:
                member.stale = True

    @torch.no_grad()
    def _observe_weights(self) -> None:
        """Let delayed scaling record the amax of the weights that training uses now."""
        used = [
            (scale, member.state.agreed)
            for member in (self.members if self.scales else ())
            if (scale := delayed_of(member.state.strategy)) is not None and member.state.agreed is not None
        ]
        if used:
            delayed.observe_together(*zip(*used, strict=True))

    def _synchronize_group(
        self, process_group: dist.ProcessGroup, members: list[Member], roll: bool, quiet: bool
    ) -> None:
        members = [member for member in members if member.reduced]
        scales = self._scales_of.get(process_group, [])
        observations = self._observations(scales, roll) if scales else []
        if not members and not observations:
            return
        own = [flags_of(members).to(members[0].device, non_blocking=True)] if members else []
        parts = [*(member.state.known_keys for member in members), *own, *observations]
        reduced, reductions = max_over_ranks(parts, process_group)
        self.reductions += reductions
        # Asked before the histories roll: that writes the scales, which then no longer look loaded.
        loaded = {scale for scale in self.scales if scale.was_loaded}
        if observations:
            self._take_observations(scales, *reduced[-2:])
        if members:
            # in the place of `own` among the parts, after one part for each weight
            flags = reduced[len(members)].view(4, -1)
            changed = self._changed(members, flags, quiet)
            if self.scales:
                own_scales = [delayed_of(member.state.strategy) for member in members]
                delayed.restart_edited(own_scales, reduced[: len(members)], flags[2], loaded)
            self._renew(members, reduced[: len(members)], changed)

    def _renew(self, members: list[Member], keys: list[torch.Tensor], changed: list[bool]) -> None:
        """Give new scales to the weights that changed on any rank.

        Args:
            members: The weights.
            keys: The keys of each, combined over ranks.
            changed: Whether each changed on any rank.
        """
        renewed = [pair for pair, is_new in zip(zip(members, keys, strict=True), changed, strict=True) if is_new]
        for member, own in zip(members, keys, strict=True):
            member.state.agreed = own
        for (member, _), scale in zip(renewed, scales_together(renewed), strict=True):
            member.renew(scale, self.steps.count)

    def _changed(self, members: list[Member], flags: torch.Tensor, quiet: bool) -> list[bool]:
        """Return which weights changed on any rank.

        Partial edits are looked for now on a CPU, with the next synchronization on a GPU: all ranks raise at the same
        place, whether or not this one has to wait for the flags.
        """
        if flags.device.type == "cpu":
            self._unchecked.append(_Unchecked(members, flags, None, steps=False))
            self._raise_for_partial_edits()
            return flags[0].bool().tolist()
        stale = [member.stale for member in members]
        # Reading the flags would let the host wait for the GPU, in every forward. No need where a step was made, in
        # which frozen weights have no part, or where none is due.
        known = all(member.stale or not member.param.is_trained for member in members) or (quiet and not any(stale))
        host = flags.to("cpu", non_blocking=known)
        arrived = torch.cuda.Event()
        arrived.record()
        self._unchecked.append(_Unchecked(members, host, arrived, steps=quiet))
        return stale if known else host[0].bool().tolist()

    def _raise_for_partial_edits(self) -> None:
        unchecked, self._unchecked = self._unchecked, []
        names = []
        for members, flags, arrived, steps in unchecked:
            if arrived is not None:
                arrived.synchronize()
            names += names_of_partial_changes(members, flags, steps=steps)
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
            state = member.state
            if state.plan() is not self:
                # Weakly: the plan holds the members, which lead to the tensors that hold these states.
                state.plan, state.name, state.geometry = weakref.ref(self), member.param.name, member.geometry


def _mark_unsharded(root: nn.Module) -> None:
    """Let optimizers that were made before `fully_shard` raise: what they hold is no part of the model any more."""
    for layer in root.modules():
        for known in (getattr(layer, "unsharded", None), *getattr(layer, "fp8_unsharded", ())):
            if known is not None and known.layer() is layer and (state := known.state()) is not None:
                state.replaced_by = "fully_shard"
                hooks.watch_replaced(state)


def _refuse(members: list[Member]) -> None:
    """Refuse, on all ranks alike, weights that were sharded in a way that FP8 cannot follow."""
    # FSDP2 has no such gather for tensors with hooks of their own: it raises NotImplementedError, in the first
    # backward.
    names = [member.param.name for member in members if member.param.reshards_to_part_of_the_mesh]
    if names:
        raise Fp8Error(
            f"reshard_after_forward with an integer does not work for weights gathered in FP8 "
            f"({', '.join(names)}): FSDP2 supports True and False for them. To keep weights within a node, "
            "shard over a two-dimensional mesh (HSDP) instead."
        )
