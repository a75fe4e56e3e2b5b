"""Hooks of models with delayed scales and no FP8 gathers."""

from typing import Any

import torch
from torch import nn

from fp8_common.torch.compat import forward_hooks
from fp8_common.torch_layers.sharding import fsdp
from fp8_torch_fsdp.scales.sync import ScaleSync, sync_of


def synchronize_before_forward(model: nn.Module) -> None:
    """Synchronize delayed scales before forwards, unless FSDP2's gathers do it."""
    forget_sync(model)  # more of its layers may have been converted
    ScaleSync.of_module(model)
    # a function, not a method of a sync: a copy of the model has another sync
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
    """Synchronize a model that FSDP2 gathers nothing in FP8 for."""
    sync = sync_of(model)
    if sync is None:
        sync = ScaleSync.of_module(model)  # of a copied model
        # its window is due if it was copied between an optimizer step and the forward after it
        sync.groups[0].due = any(bool(scale.late.any()) for scale in sync.scales if not scale.late.is_meta)
    if sync.sharded:
        return
    changed = bool(sync.scales) and sync.tree.has_changed(model)
    if changed:
        weights = (shard.local.fp8_weight for shard in fsdp.shards(model) if hasattr(shard.local, "fp8_weight"))
        first = next((weight for weight in weights if weight.sync is None), None)
        if first is not None:
            # a root whose own FSDP group is empty comes here before its first gather; the sync of that takes the scales
            ScaleSync.at_first_gather(first)
            return
    sync.before_forward(model, sync.weights, changed)


def _after_forward(model: nn.Module, args: object, output: object) -> None:
    sync = sync_of(model)
    if sync is not None and not sync.sharded:
        sync._running = False
