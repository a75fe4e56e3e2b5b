"""Decides when the scales of a traceable model are agreed on: one all-reduce before each forward of the root.

In the hook before the root's forward every rank looks at its rows of every weight. That hook runs outside of captured
graphs, which read the scales as inputs and check that their weights are those that the scales were made for.
"""

import weakref
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn

from fp8_common import Fp8Error
from fp8_common.torch import _delayed as delayed
from fp8_common.torch._fsdp import WeightState, track_optimizer_steps
from fp8_torch_fsdp._traceable.placement import local_of


class TraceablePlan:
    """The FP8 weights and delayed scales under one root.

    Attributes:
        scales: The delayed scales under the root.
        reductions: Number of all-reduces issued so far on this rank.
    """

    def __init__(
        self, root: nn.Module, weights: Sequence[tuple[nn.Parameter, WeightState]], groups: Sequence[dist.ProcessGroup]
    ) -> None:
        """Hook the forward of `root`; `groups` lead together to every rank that must agree."""
        self._root = weakref.ref(root)
        self._weights, self._groups = list(weights), [group for group in groups if group.size() > 1]
        self.scales = delayed.delayed_scales(root)
        self.reductions = 0
        self._explicit = False
        track_optimizer_steps()
        root.register_forward_pre_hook(torch._dynamo.disable(self._before_root_forward), prepend=True)

    def __deepcopy__(self, memo: dict) -> "TraceablePlan":
        """Refuse, as FSDP2 does: a copy would share its scales with the first model."""
        raise Fp8Error(
            "A model under fully_shard_traceable cannot be copied. Copy it before it is sharded, or load its state "
            "dict into another one."
        )

    def synchronize_now(self, *, roll: bool) -> None:
        """Synchronize on request, after a step."""
        self._synchronize(roll=roll)

    def _before_root_forward(self, module: nn.Module, args: object) -> None:
        self._synchronize(roll=False)
        if module.training and torch.is_grad_enabled():
            with torch.no_grad():
                for _, state in self._weights:
                    if state.agreed is not None and state.agreed.numel():
                        state.strategy.record(state.agreed)

    @torch.no_grad()
    def _synchronize(self, *, roll: bool) -> None:
        """Agree on every scale. Every rank of the root must call it."""
        with torch.inference_mode(False):
            for parameter, state in self._weights:
                state.keys = state.strategy.local_keys(local_of(parameter), state)
            parts = [state.known_keys for _, state in self._weights]
            if self.scales:
                parts += [delayed.stack_keys(self.scales), delayed.due(self.scales, roll)]
            agreed = self._agree(parts)
            if self.scales:
                delayed.roll(self.scales, agreed[-2], agreed[-1][0] > 0)
            for (_, state), keys in zip(self._weights, agreed, strict=False):
                state.agreed = keys
                state.scale = state.strategy.scale_from_keys(keys, state) if keys.numel() else None

    def _agree(self, parts: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Return the MAX of int32 `parts` over all ranks; without parts there is nothing to send."""
        payload = torch.cat(parts) if parts else torch.zeros(0)
        if payload.numel():
            for group in self._groups:
                dist.all_reduce(payload, op=dist.ReduceOp.MAX, group=group)
                self.reductions += 1
        return payload.split([part.numel() for part in parts])
