"""The one place of this package that touches private parts of PyTorch: functional collectives, the forward of DDP.

The operators of functional collectives are what a compiler captures; the Python functions around them were renamed
between torch 2.11 and 2.13, the operators were not. A test tells what an upgrade broke. FSDP2's own private parts are
the business of `fp8_common.torch.sharding.fsdp`.
"""

import torch
import torch.distributed._functional_collectives  # registers what autograd and compilers need
from torch.nn.parallel import DistributedDataParallel

collectives = torch.ops._c10d_functional
"""The operators of functional collectives; what they start is used after `wait_tensor`."""


def replicating_ddp() -> DistributedDataParallel | None:
    """Return the `DistributedDataParallel` whose forward runs now, if its backward will reduce gradients; else None."""
    ddp = DistributedDataParallel._get_active_ddp_module()
    if ddp is None or not ddp.require_backward_grad_sync or ddp._join_config.enable:
        return None  # under `join` ranks leave one after the other
    return ddp
