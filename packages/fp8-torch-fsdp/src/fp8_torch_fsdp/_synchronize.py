"""Decides when scales are synchronized outside of FSDP2's own rhythm: on request, and for models without FP8 gathers.

Under FSDP2 with FP8 weights everything happens in one all-reduce at the next root forward (see
`fp8_common.torch._fsdp.sync`). The functions here do the same at a moment of the caller's choice.
"""

import logging
import weakref

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from fp8_common.torch import _delayed as delayed
from fp8_common.torch._fsdp import SyncPlan, group_of, meshes_of, ranks_along, track_optimizer_steps
from fp8_torch_fsdp._counters import plans_of

logger = logging.getLogger(__name__)


def precompute_float8_dynamic_scale_for_fsdp(model: nn.Module) -> None:
    """Synchronize the scales of all FP8 weights now, for example right after `optimizer.step()`.

    Optional: the next root forward does it otherwise. All ranks must call it. Before the first forward of an FSDP root
    there is nothing to synchronize and the call does nothing.
    """
    for plan in plans_of(model):
        plan.synchronize_now(roll=False)


def sync_float8_amax_and_scale_history(model: nn.Module, *, group: dist.ProcessGroup | None = None) -> None:
    """Synchronize everything now and roll the histories of delayed scaling. All ranks must call it.

    Args:
        model: The converted model.
        group: The ranks that combine what they observed, for models that are replicated rather than sharded (DDP);
            sharded models know theirs.

    Optional under FSDP2; call it before saving a checkpoint of a model with delayed scaling, so that what was
    observed in the last step is part of it, and once per step where the model is not called through the module that
    was converted. A second call without a new observation changes nothing.
    """
    plans = plans_of(model)
    for plan in plans:
        plan.synchronize_now(roll=True)
    _reduce(model, _without_plan(model, plans), roll=True, group=group)


class Float8Controller:
    """Synchronizes after every optimizer step instead of at the next forward.

    Args:
        model: The converted model.
        optimizer: Its optimizer; every rank must step it together.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self._model, self._optimizer = weakref.ref(model), weakref.ref(optimizer)
        # An optimizer's own hooks run before the global one that marks its weights as changed: too early.
        track_optimizer_steps()
        self._handle = register_optimizer_step_post_hook(torch.compiler.disable(self._after_step))
        # `atexit` is a property, for which the stub leaves no slot
        weakref.finalize(optimizer, self._handle.remove).atexit = False  # pyrefly: ignore[missing-attribute]

    def remove(self) -> None:
        """Go back to synchronizing at the next forward."""
        self._handle.remove()

    def _after_step(self, optimizer: Optimizer, args: tuple, kwargs: dict) -> None:
        if (model := self._model()) is not None and optimizer is self._optimizer():
            sync_float8_amax_and_scale_history(model)


def synchronize_before_forward(model: nn.Module) -> None:
    """Make `model` synchronize its delayed scales itself, before the first forward after an optimizer step."""
    track_optimizer_steps()
    model.register_forward_pre_hook(torch._dynamo.disable(_before_forward))


def _before_forward(model: nn.Module, args: object) -> None:
    _reduce(model, _without_plan(model, plans_of(model)), roll=False)


def _without_plan(model: nn.Module, plans: list[SyncPlan]) -> list[delayed.DelayedScale]:
    """Return the delayed scales that no plan takes care of."""
    planned = {id(scale) for plan in plans for scale in plan.scales}
    return [scale for scale in delayed.delayed_scales(model) if id(scale) not in planned]


def _reduce(
    model: nn.Module, scales: list[delayed.DelayedScale], *, roll: bool, group: dist.ProcessGroup | None = None
) -> None:
    """Combine `scales` over the ranks that share the model's parameters, and roll if any of them made a step."""
    if scales:
        delayed.reduce_and_roll(scales, group or _process_group(model), force=roll)


def _process_group(model: nn.Module) -> dist.ProcessGroup | None:
    """Return the group over which the model's parameters are distributed in any way; None for a model that is not."""
    mesh = max(meshes_of(model), key=lambda mesh: mesh.size(), default=None)
    if mesh is None:
        return None
    return group_of(ranks_along(mesh, [True] * mesh.ndim), mesh.get_group(mesh.ndim - 1))
