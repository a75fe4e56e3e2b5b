"""`ScalePlan`: the delayed scales of one model, the steps of its optimizers, and when the ranks agree on what.

A plan belongs to the module that is called, its root. There are three kinds: `LocalPlan` for models that gather no
weight in FP8, `SyncPlan` for weights under FSDP2, `TraceablePlan` for `fully_shard_traceable`.
"""

import abc
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from fp8_common.torch.plugin import fsdp, max_over_ranks
from fp8_torch_fsdp import _delayed as delayed
from fp8_torch_fsdp._delayed import DelayedScale
from fp8_torch_fsdp._optimizer_steps import OptimizerSteps

Shared = tuple[Sequence[DelayedScale], Sequence[dist.ProcessGroup]]
"""Delayed scales and the process groups that together lead to all ranks that have them."""


class ScalePlan(abc.ABC):
    """What keeps the scales of one model equal on all of its ranks.

    Attributes:
        scales: The delayed scales under the root, in the order that all ranks share.
        steps: The optimizer steps that concern the model.
        reductions: Number of MAX all-reduces issued so far on this rank.
    """

    def __init__(self, root: nn.Module | None) -> None:
        # Weakly: the root keeps its plan alive, by an attribute or by its hooks.
        self._root = (lambda: None) if root is None else weakref.ref(root)
        self.scales: list[DelayedScale] = []
        self.steps = OptimizerSteps(self.parameters, before=self._before_step, after=self._after_step)
        self.reductions = 0
        self._stepped = False
        self._combining = False

    def parameters(self) -> Iterable[torch.Tensor]:
        """Return the parameters of the model as optimizers hold them."""
        root = self._root()
        return () if root is None else fsdp.parameters_of(root)

    @abc.abstractmethod
    def synchronize_now(self, *, roll: bool, group: dist.ProcessGroup | None = None) -> None:
        """Agree on everything on request, on all ranks of the model.

        Args:
            roll: Make the next delayed scales even if no optimizer step was made since the last time.
            group: The ranks that combine what they observed, for models that are replicated and not sharded.
        """

    def _before_step(self) -> None:  # noqa: B027 most plans see writes as they happen
        """Note what was written before a step of an optimizer of the model begins: it is no part of the step."""

    def _after_step(self, optimizer: Optimizer) -> None:
        self._stepped = True
        # In a backward (an optimizer for each parameter, stepped by hooks) layers may still compute again what a
        # checkpoint left out: their scales are those of this step, and no marks shall stop them.
        if self.scales and not fsdp.in_backward():
            delayed.mark_late(self.scales)

    def take(self, scales: Sequence[DelayedScale], *, shared: bool) -> None:
        """Own these scales from now on, whoever did before; `shared` says whether other ranks have them too."""
        self.scales = list(scales)
        for scale in scales:
            scale.owner, scale.shared = self, shared

    def _observations(self, scales: Sequence[DelayedScale], roll: bool) -> list[torch.Tensor]:
        """Return what ranks combine of n delayed scales, int32: the keys [n], and whether to roll [1]."""
        return [delayed.observed_keys(scales), delayed.due(scales, roll or self._stepped)]

    def _take_observations(self, scales: Sequence[DelayedScale], keys: torch.Tensor, due: torch.Tensor) -> None:
        """Take over combined observations; where any rank made a step, the histories roll."""
        # without a step, the observations of this rank stay for later
        delayed.roll(scales, keys, due[0] > 0)

    def _combine_after_backward(self, output: object, shared: Iterable[Shared]) -> None:
        """Combine what the ranks observe in this forward and its backward, when the backward has ended.

        Checkpoints hold what all ranks know. Every rank runs this backward, because FSDP2's gradients need it: the
        all-reduce waits for nobody who does not come.

        Args:
            output: What the forward of the root returns.
            shared: Scales, and the groups that lead to all ranks that have them.
        """

        def queue(grad: torch.Tensor) -> None:
            if not self._combining and self._backward_begins():  # several outputs have gradients
                self._combining = True
                fsdp.at_end_of_backward(combine)

        def combine() -> None:
            self._combining = False
            with torch.no_grad():
                for scales, groups in shared:
                    if scales:
                        (keys,), reductions = max_over_ranks([delayed.observed_keys(scales)], *groups)
                        delayed.take_combined(scales, keys)
                        self.reductions += reductions

        self._combining = False  # a backward that raised an exception did not come to its end
        for leaf in pytree.tree_leaves(output):
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                # Callbacks for the end of a backward can be queued inside of one alone: the gradient of an output comes
                # first.
                leaf.register_hook(queue)

    def _backward_begins(self) -> bool:
        """Return whether the ranks combine their observations when the backward that begins has ended."""
        return True


def scales_by_group(
    scales: Sequence[DelayedScale], params: Iterable[fsdp.ShardedParam], largest: dist.ProcessGroup
) -> dict[dist.ProcessGroup, list[DelayedScale]]:
    """Return the delayed scales by the ranks that share them: those of a layer, by all that have parts of its weight.

    Ranks with other experts in the place of these do not. Largest groups come first: all ranks reduce in one order.

    Args:
        scales: The scales of a model.
        params: Its parameters under FSDP2.
        largest: The ranks that share those of layers that FSDP2 was told to leave alone.
    """
    groups = dict.fromkeys(scales, largest)
    modules = {id(p.module): p for p in params}
    for param in modules.values():
        own = [scale for scale in param.module.children() if isinstance(scale, DelayedScale) and scale in groups]
        if own:
            groups |= dict.fromkeys(own, fsdp.group_of(param.peers(replicas=True), param.process_group))
    result: dict[dist.ProcessGroup, list[DelayedScale]] = {}
    for scale in sorted(groups, key=lambda scale: -groups[scale].size()):
        result.setdefault(groups[scale], []).append(scale)
    return result


def plan_of_root(module: nn.Module) -> Any:
    """Return the plan that a module carries itself, as the root of a model that FSDP2 does not gather in FP8."""
    return getattr(module, "fp8_plan", None)
