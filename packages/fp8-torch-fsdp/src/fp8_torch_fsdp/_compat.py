"""Private names of PyTorch: functional collectives, DDP and FSDP1.

Compilers capture the operators of functional collectives. The Python functions around them were renamed between torch
2.11 and 2.13; the operators were not. A test fails if a new version of torch breaks a private name. FSDP2's private
names are in `fp8_common.torch_layers.sharding.fsdp`.
"""

import torch
import torch.distributed._functional_collectives  # registers the autograd and compiler rules
from torch.nn.parallel import DistributedDataParallel

collectives = torch.ops._c10d_functional
"""Operators of functional collectives; their results are valid after `wait_tensor`."""


def running_ddp() -> DistributedDataParallel | None:
    """Return the `DistributedDataParallel` whose forward is running, or None."""
    return DistributedDataParallel._get_active_ddp_module()


def joins(ddp: DistributedDataParallel) -> bool:
    """Return whether a DDP runs under `join()`, which allows uneven inputs."""
    return ddp._join_config.enable


def ignore_buffers(ddp: DistributedDataParallel, names: set[str]) -> None:
    """Exclude buffers with these names from the broadcasts of a DDP."""
    ddp.parameters_to_ignore |= names
    ddp._assign_modules_buffers()


def is_of_fsdp1(weight: torch.Tensor) -> bool:
    """Return whether `FullyShardedDataParallel` holds a weight in its flat parameter."""
    # FSDP1 marks its flat parameter, of which layers hold views, and the original parameters.
    return getattr(weight, "_fsdp_flattened", False) or getattr(weight._base, "_fsdp_flattened", False)
