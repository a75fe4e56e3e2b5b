"""`TraceablePlan`: agrees on the scales of a traceable model, in one all-reduce before each forward of the root.

In the hook before the root's forward every rank looks at its rows of every weight. That hook runs outside of captured
graphs, which read the scales as inputs and check that their weights are those that the scales were made for.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from fp8_common import Fp8Error
from fp8_common.torch.plugin import max_over_ranks
from fp8_torch_fsdp import _delayed as delayed
from fp8_torch_fsdp._delayed import delayed_scales
from fp8_torch_fsdp._scale_plan import ScalePlan
from fp8_torch_fsdp._strategies import delayed_of
from fp8_torch_fsdp._traceable.placement import local_of
from fp8_torch_fsdp._weight_state import WeightState, version_of


class TraceablePlan(ScalePlan):
    """The FP8 weights and delayed scales under one root."""

    def __init__(
        self, root: nn.Module, weights: Sequence[tuple[nn.Parameter, WeightState]], groups: Sequence[dist.ProcessGroup]
    ) -> None:
        """Hook the forward of `root`; `groups` lead together to every rank that must agree."""
        super().__init__(root)
        self._weights, self._groups = list(weights), [group for group in groups if group.size() > 1]
        self._versions: list[int | None] = [None] * len(self._weights)
        self.take(delayed_scales(root), shared=bool(self._groups))
        # prepend: the hooks of others may use the layers already
        root.register_forward_pre_hook(torch._dynamo.disable(self._before_root_forward), prepend=True)
        # Without delayed scaling nothing is observed that ranks would have to combine.
        if self.scales and self._groups:
            root.register_forward_hook(torch._dynamo.disable(self._after_root_forward))

    def __deepcopy__(self, memo: dict) -> "TraceablePlan":
        """Refuse, as FSDP2 does: a copy would share its scales with the first model."""
        raise Fp8Error(
            "A model under fully_shard_traceable cannot be copied. Copy it before it is sharded, or load its state "
            "dict into another one."
        )

    def synchronize_now(self, *, roll: bool, group: dist.ProcessGroup | None = None) -> None:
        """Synchronize on request, after a step."""
        self._synchronize(roll=roll)

    def _before_root_forward(self, module: nn.Module, args: object) -> None:
        self.steps.forget_interrupted()
        self._synchronize(roll=False)
        if module.training and torch.is_grad_enabled():
            with torch.no_grad():
                for _, state in self._weights:
                    if state.agreed is not None and state.agreed.numel():
                        state.strategy.record(state.agreed)

    def _after_root_forward(self, module: nn.Module, args: object, output: object) -> None:
        if module.training and torch.is_grad_enabled():
            self._combine_after_backward(output, [(self.scales, self._groups)])

    def _after_step(self, optimizer: Optimizer) -> None:
        super()._after_step(optimizer)
        self._note_versions()

    def _note_versions(self) -> None:
        self._versions = [version_of(local_of(parameter).detach()) for parameter, _ in self._weights]

    @torch.no_grad()
    def _synchronize(self, *, roll: bool) -> None:
        """Agree on every scale. Every rank of the root must call it."""
        # Scales outlive this forward: those made in inference mode could not be saved by the autograd of a later one.
        with torch.inference_mode(False):
            for parameter, state in self._weights:
                state.keys = state.strategy.local_keys(local_of(parameter), state.geometry)
            edited = self._edited()
            observations = self._observations(self.scales, roll) if self.scales else []
            # The same parts on every rank, changed or not: sizes of a reduction must not depend on what one rank did.
            parts = [*(state.known_keys for _, state in self._weights), edited, *observations]
            reduced, reductions = max_over_ranks(parts, *self._groups)
            self.reductions += reductions
            self._stepped = False
            count = len(self._weights)
            if self.scales:
                loaded = {scale for scale in self.scales if scale.was_loaded}
                self._take_observations(self.scales, *reduced[-2:])
                own = [delayed_of(state.strategy) for _, state in self._weights]
                delayed.restart_edited(own, reduced[:count], reduced[count], loaded)
            # strict=False: flags and observations follow the keys
            for (_, state), keys in zip(self._weights, reduced, strict=False):
                state.agreed = keys
                state.scale = state.strategy.scale_from_keys(keys, state.geometry) if keys.numel() else None

    def _edited(self) -> torch.Tensor:
        """Return int32 [n], whether each weight was written to by something else than a step; [0] without history."""
        if not self.scales:
            return torch.zeros(0, dtype=torch.int32)
        # Versions of now are noted at once: this synchronization covers them.
        known = self._versions
        self._note_versions()
        changed = [before is not None and before != now for before, now in zip(known, self._versions, strict=True)]
        return torch.tensor(changed, dtype=torch.int32, device=self.scales[0].key.device)
