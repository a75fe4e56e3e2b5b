"""Delayed scaling under `DistributedDataParallel`: ranks combine only their observations.

DDP would send the scales and histories of its first rank to all others before each forward, because they are buffers.
"""

import warnings
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from fp8_common import Fp8Error
from fp8_common.torch_layers.sharding.fsdp_forwards import in_backward
from fp8_torch_fsdp import _compat as compat
from fp8_torch_fsdp.scales.delayed import BUFFERS, DelayedScale


def group_of_replicas(
    scales: Sequence[DelayedScale], *, due: bool, before: dist.ProcessGroup | None
) -> dist.ProcessGroup | None:
    """Return the DDP ranks of the model; exclude `scales` from broadcasts.

    A DDP that called the model earlier counts, too.

    Args:
        scales: All delayed scales of the model.
        due: Whether the windows move in this forward if it has gradients.
        before: Result of the last call.

    Raises:
        Fp8Error: The DDP runs under `join()`, where ranks end one after the other.
    """
    ddp = compat.running_ddp()
    if ddp is None:
        # `ddp.module(...)`: who trains so does not call the others
        alone = before is not None and due and torch.is_grad_enabled() and not in_backward()
        if alone:
            warnings.warn(
                "A model with delayed scaling is trained outside of the forward of its DistributedDataParallel: each "
                "rank uses only its own observations. Call the wrapper, or synchronize_scales(model, group=...) "
                "after each optimizer step.",
                stacklevel=2,
            )
        return None if alone else before
    if not scales:
        return None
    if compat.joins(ddp):
        raise Fp8Error(
            "Delayed scaling does not work under DistributedDataParallel.join(): ranks that have ended cannot combine "
            "amaxes. Give all ranks the same number of batches, or use a recipe with dynamic scaling."
        )
    _keep_from_broadcasts(ddp, scales)
    return ddp.process_group


def _keep_from_broadcasts(ddp: DistributedDataParallel, scales: Sequence[DelayedScale]) -> None:
    """Make DDP ignore the buffers of scales, from its next forward on."""
    if not any(buffer is scales[0].scale for buffer in ddp.modules_buffers):
        return
    wanted = {id(scale) for scale in scales}
    names = [name for name, module in ddp.module.named_modules() if id(module) in wanted]
    compat.ignore_buffers(ddp, {f"{name}.{buffer}".lstrip(".") for name in names for buffer in BUFFERS})
