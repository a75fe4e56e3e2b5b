"""The one place of this package that touches private parts of PyTorch: functional collectives, DDP and FSDP1.

The operators of functional collectives are what a compiler captures; the Python functions around them were renamed
between torch 2.11 and 2.13, the operators were not. A test tells what an upgrade broke. FSDP2's own private parts are
the business of `fp8_common.torch_layers.sharding.fsdp`.
"""

import torch
import torch.distributed._functional_collectives  # registers what autograd and compilers need
from torch.nn.parallel import DistributedDataParallel

collectives = torch.ops._c10d_functional
"""The operators of functional collectives; what they start is used after `wait_tensor`."""


def running_ddp() -> DistributedDataParallel | None:
    """Return the `DistributedDataParallel` whose forward runs now, or None."""
    return DistributedDataParallel._get_active_ddp_module()


def joins(ddp: DistributedDataParallel) -> bool:
    """Return whether ranks may end one after the other, under `ddp.join()`."""
    return ddp._join_config.enable


def ignore_buffers(ddp: DistributedDataParallel, names: set[str]) -> None:
    """Keep the buffers of these names out of the broadcasts of a DDP from now on."""
    ddp.parameters_to_ignore |= names
    ddp._assign_modules_buffers()


def is_of_fsdp1(weight: torch.Tensor) -> bool:
    """Return whether `FullyShardedDataParallel` has made a weight a part of its flat parameter."""
    # FSDP1 marks its flat parameter, of which layers get views, and the parameters that it was made of
    return getattr(weight, "_fsdp_flattened", False) or getattr(weight._base, "_fsdp_flattened", False)
