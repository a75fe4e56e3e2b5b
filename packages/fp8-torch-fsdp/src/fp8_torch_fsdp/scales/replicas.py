"""Find a model's DDP ranks and exclude delayed scales from broadcasts.

Under `DistributedDataParallel`, ranks combine the observations of their delayed scales. Scales and histories are
buffers, which DDP would otherwise broadcast from its first rank before each forward.
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
    scales: Sequence[DelayedScale], *, needs_roll: bool, before: dist.ProcessGroup | None
) -> dist.ProcessGroup | None:
    """Return a model's DDP ranks; exclude its delayed scales from broadcasts.

    Args:
        scales: All delayed scales of the model.
        needs_roll: Whether the windows roll in this forward, if it has gradients.
        before: Result of the last call, which is returned if no DDP is running: the module inside of a DDP may be
            called directly.

    Returns:
        The ranks that combine observations. None without a DDP, and after the warning about training without it.

    Raises:
        Fp8Error: If the DDP runs under `join()`, where ranks may end at different steps.
    """
    ddp = compat.running_ddp()
    if ddp is None:
        # Training by `ddp.module(...)`: the other ranks may not call it, so observations cannot be combined.
        alone = before is not None and needs_roll and torch.is_grad_enabled() and not in_backward()
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
            "observations. Give all ranks the same number of batches, or use a recipe with dynamic scaling."
        )
    _exclude_from_broadcasts(ddp, scales)
    return ddp.process_group


def _exclude_from_broadcasts(ddp: DistributedDataParallel, scales: Sequence[DelayedScale]) -> None:
    """Exclude delayed scales from broadcasts, from DDP's next forward on."""
    if not any(buffer is scales[0].scale for buffer in ddp.modules_buffers):
        return
    scale_ids = {id(scale) for scale in scales}
    names = [name for name, module in ddp.module.named_modules() if id(module) in scale_ids]
    compat.ignore_buffers(ddp, {f"{name}.{buffer}".lstrip(".") for name in names for buffer in BUFFERS})
