"""State dicts of FP8 weights: plain tensors under the usual names."""

from typing import Any

import torch
from torch import nn

from fp8_common.torch.compat import local_of, map_local, state_dict_hooks
from fp8_torch_fsdp.all_gather.sharded_weight import ShardedFloat8Weight
from fp8_torch_fsdp.scales.delayed import DelayedScale


def keep_state_dicts_plain(module: nn.Module) -> None:
    """Make state dicts hold plain tensors and assigning loads keep FP8 weights."""
    # Once for each module: it may be converted again, or own several parameters that are gathered in FP8.
    if not any(hook is _unwrap for hook in state_dict_hooks(module)[0].values()):
        module.register_state_dict_post_hook(_unwrap)
        module.register_load_state_dict_pre_hook(_wrap_assigned)


def forget_state_dict_hooks(module: nn.Module) -> None:
    """Undo `keep_state_dicts_plain`."""
    for hooks in state_dict_hooks(module):
        for key, hook in list(hooks.items()):
            # torch wraps hooks that want the module in an object that has the function as `hook`.
            if getattr(hook, "hook", hook) in (_unwrap, _wrap_assigned):
                del hooks[key]


def plain_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a weight, or a DTensor of it, as a plain view."""
    return map_local(tensor, lambda own: own.plain if isinstance(own, ShardedFloat8Weight) else own)


def _unwrap(module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: dict) -> None:
    # of children too: parametrizations keep the weight there, pruning and old weight_norm under another name
    for name, parameter in module.named_parameters(remove_duplicate=False):
        key = f"{prefix}{name}"
        if key in state_dict and state_dict[key] is not parameter:  # `keep_vars=True` returns the parameter itself
            state_dict[key] = plain_of(state_dict[key])


def _wrap_assigned(
    module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: dict, *rest: object
) -> None:
    """Wrap tensors that `load_state_dict(assign=True)` assigns to FP8 weights."""
    if not local_metadata.get("assign_to_params_buffers"):
        return
    for name, parameter in module.named_parameters(remove_duplicate=False):
        own = local_of(parameter)
        key = f"{prefix}{name}"
        if key in state_dict and isinstance(own, ShardedFloat8Weight):
            # Bound as a default argument: a lambda would look `own` up when it is called, after the loop has gone on.
            state_dict[key] = map_local(state_dict[key], lambda t, own=own.fp8_weight: ShardedFloat8Weight(t, own))
    weight = state_dict.get(f"{prefix}weight")
    for scale in module.children():
        # delayed scales are in no state dict of the model: they leave the meta device with the weight
        if isinstance(scale, DelayedScale) and scale.scale.is_meta and weight is not None and not weight.is_meta:
            scale.to_empty(device=weight.device)
