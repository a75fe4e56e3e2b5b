"""Forward hooks of models with delayed scales and no FP8 gathers."""

from typing import Any

import torch
from torch import nn

from fp8_common.torch.compat import forward_hooks
from fp8_common.torch_layers.sharding import fsdp
from fp8_torch_fsdp.scales.sync import ScaleSync, sync_of


def synchronize_before_forward(model: nn.Module) -> None:
    """Register hooks that synchronize delayed scales before each forward.

    The hooks do nothing once FSDP2 or `fully_shard_traceable` gathers weights of the model in FP8.
    """
    forget_sync(model)  # from an earlier conversion of other layers
    ScaleSync.of_module(model)
    # Functions, not methods of the sync: a copied model has the same hooks and another sync.
    before: Any = torch.compiler.disable(_before_forward)
    after: Any = torch.compiler.disable(_after_forward)
    before.of_fp8_sync = after.of_fp8_sync = True
    model.register_forward_pre_hook(before, prepend=True)
    model.register_forward_hook(after)


def forget_sync(model: nn.Module) -> None:
    """Undo `synchronize_before_forward`."""
    sync = sync_of(model)
    if sync is not None and not sync.sharded:
        for scale in sync.scales:
            scale.sync = None
        del model.fp8_sync
    for hooks in forward_hooks(model):
        for key, hook in list(hooks.items()):
            if getattr(hook, "of_fp8_sync", False):
                del hooks[key]


def _before_forward(model: nn.Module, args: object) -> None:
    """Synchronize the delayed scales of a model without FP8 gathers."""
    sync = sync_of(model)
    if sync is None:  # a copied model
        sync = ScaleSync.of_module(model)
        # Windows must roll if the model was copied between an optimizer step and the next forward.
        sync.groups[0].needs_roll = any(bool(scale.late.any()) for scale in sync.scales if not scale.late.is_meta)
    if sync.sharded:
        return
    changed = bool(sync.scales) and sync.structure.has_changed(model)
    if changed:
        weights = (shard.local.fp8_weight for shard in fsdp.shards(model) if hasattr(shard.local, "fp8_weight"))
        first = next((weight for weight in weights if weight.sync is None), None)
        if first is not None:
            # A root without parameters in its own FSDP group runs this hook before the first gather. The sync created
            # here holds the delayed scales from now on.
            ScaleSync.at_first_gather(first)
            return
    sync.before_forward(model, sync.weights, changed)


def _after_forward(model: nn.Module, args: object, output: object) -> None:
    sync = sync_of(model)
    if sync is not None and not sync.sharded:
        sync._running = False
