"""What tests of sharded models compare: whole parameters and buffers, whatever the sharding."""

import torch
from torch.distributed.tensor import DTensor

import fp8_torch_fsdp as f8


def whole(model):
    """The state dict, gathered, after everything that ranks observed was combined."""
    f8.synchronize_scales(model)
    state = model.state_dict()
    return {name: v.full_tensor() if isinstance(v, DTensor) else v.clone() for name, v in state.items()}


def unlike(a, b):
    """The names of what differs in a bit."""
    return [name for name in a if not torch.equal(a[name], b[name])]
