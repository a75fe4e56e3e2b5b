"""What checkpoints see of FP8 weights: plain tensors under the usual names, that need no package to load."""

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fp8_torch_fsdp._sharded import ShardedFloat8Weight


def keep_state_dicts_plain(module: nn.Module, name: str = "weight") -> None:
    """Make `module.state_dict()` hold a plain `name`, and an assigning load keep the FP8 weight what it is."""
    module._register_state_dict_hook(partial(_unwrap, name))
    module._register_load_state_dict_pre_hook(partial(_wrap_assigned, name), with_module=True)


def _unwrap(name: str, module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: dict) -> None:
    key = f"{prefix}{name}"
    if key in state_dict:
        state_dict[key] = map_local(state_dict[key], lambda t: t.lend() if isinstance(t, ShardedFloat8Weight) else t)


def _wrap_assigned(
    name: str, module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: dict, *rest: object
) -> None:
    """Wrap what `load_state_dict(assign=True)` is about to put in the place of an FP8 weight."""
    parameter = getattr(module, name)
    own = getattr(parameter, "_local_tensor", parameter)
    key = f"{prefix}{name}"
    if not (local_metadata.get("assign_to_params_buffers") and isinstance(own, ShardedFloat8Weight)):
        return
    if key in state_dict:
        state_dict[key] = map_local(state_dict[key], lambda t: ShardedFloat8Weight(t, own._state.fresh()))


def map_local(tensor: torch.Tensor, change: Any) -> torch.Tensor:
    """Apply `change` to a tensor, or to the local part of a DTensor."""
    if isinstance(tensor, DTensor):
        local = change(tensor._local_tensor)
        return DTensor(local, tensor._spec, requires_grad=tensor.requires_grad)
    return change(tensor)
