"""The one place of this package that touches private parts of PyTorch: functional collectives, the forward of DDP.

The operators of functional collectives are what a compiler captures; the Python functions around them were renamed
between torch 2.11 and 2.13, the operators were not. `check` tells what an upgrade broke; a test calls it. FSDP2's own
private parts are the business of `fp8_common.torch.sharding.fsdp`.
"""

import torch
import torch.distributed._functional_collectives  # registers what autograd and compilers need
from torch.nn.parallel import DistributedDataParallel

from fp8_common import Fp8UnsupportedError

collectives = torch.ops._c10d_functional
"""The operators of functional collectives; what they start is used after `wait_tensor`."""

COLLECTIVES = ("all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce", "wait_tensor")
"""Operators that the traceable mode is made of."""


def check() -> None:
    """Raise if this torch lacks an operator that the traceable mode needs.

    Raises:
        Fp8UnsupportedError: Naming what is missing and what to do.
    """
    missing = [name for name in COLLECTIVES if not hasattr(collectives, name)]
    if missing:
        raise Fp8UnsupportedError(
            f"fully_shard_traceable needs operators that torch {torch.__version__} does not have: "
            f"{', '.join(missing)}. Use torch 2.11 to 2.15, a newer release of this package, or fully_shard."
        )


def replicating_ddp() -> DistributedDataParallel | None:
    """Return the `DistributedDataParallel` whose forward runs now, if its backward will reduce gradients; else None."""
    ddp = DistributedDataParallel._get_active_ddp_module()
    if ddp is None or not ddp.require_backward_grad_sync or ddp._join_config.enable:
        return None  # under `join` ranks leave one after the other
    return ddp
