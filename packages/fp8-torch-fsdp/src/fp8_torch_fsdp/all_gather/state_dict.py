"""State dicts of FP8 modules: plain tensors under the usual names."""

from typing import Any

import torch
from torch import nn

from fp8_common.torch.compat import local_of, map_local, state_dict_hooks
from fp8_torch_fsdp.all_gather.sharded_weight import ShardedFloat8Weight
from fp8_torch_fsdp.scales.delayed import DelayedScale


def keep_state_dicts_plain(module: nn.Module) -> None:
    """Register hooks so that state dicts hold plain tensors.

    Loads with `assign=True` wrap the assigned tensors, so that they are gathered in FP8 again.
    """
    # Only one hook per module, which may be converted again.
    if not any(hook is _unwrap for hook in state_dict_hooks(module)[0].values()):
        module.register_state_dict_post_hook(_unwrap)
        module.register_load_state_dict_pre_hook(_wrap_assigned)


def forget_state_dict_hooks(module: nn.Module) -> None:
    """Undo `keep_state_dicts_plain`."""
    for hooks in state_dict_hooks(module):
        for key, hook in list(hooks.items()):
            # torch wraps hooks that get the module in an object with the function as its attribute `hook`.
            if getattr(hook, "hook", hook) in (_unwrap, _wrap_assigned):
                del hooks[key]


def plain_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a weight, or a DTensor of it, without the wrapper."""
    return map_local(tensor, lambda local: local.plain if isinstance(local, ShardedFloat8Weight) else local)


def _unwrap(module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: dict) -> None:
    # Parameters of children are included: parametrizations move the weight to a child, pruning and the old weight_norm
    # rename it.
    for name, parameter in module.named_parameters(remove_duplicate=False):
        key = f"{prefix}{name}"
        if key in state_dict and state_dict[key] is not parameter:  # with `keep_vars=True` it is the parameter
            state_dict[key] = plain_of(state_dict[key])


def _wrap_assigned(
    module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: dict, *rest: object
) -> None:
    """Wrap tensors that `load_state_dict(assign=True)` assigns to FP8 weights."""
    if not local_metadata.get("assign_to_params_buffers"):
        return
    for name, parameter in module.named_parameters(remove_duplicate=False):
        local = local_of(parameter)
        key = f"{prefix}{name}"
        if key in state_dict and isinstance(local, ShardedFloat8Weight):
            state = local.fp8_weight
            state_dict[key] = map_local(state_dict[key], lambda tensor, state=state: ShardedFloat8Weight(tensor, state))
    weight = state_dict.get(f"{prefix}weight")
    for scale in module.children():
        # The model's state dict has no delayed scales, so they leave the meta device with the weight.
        if isinstance(scale, DelayedScale) and scale.scale.is_meta and weight is not None and not weight.is_meta:
            scale.to_empty(device=weight.device)
