"""Synchronization of scales at a moment of the caller's choice, instead of before the next forward of the root."""

import torch
import torch.distributed as dist
from torch import nn

from fp8_common import Fp8Error
from fp8_torch_fsdp._counters import plans_of
from fp8_torch_fsdp._delayed import delayed_scales, settle
from fp8_torch_fsdp._local_plan import synchronize_before_forward


def synchronize_scales(model: nn.Module, *, group: dist.ProcessGroup | None = None) -> None:
    """Synchronize everything now and roll the histories of delayed scaling. All ranks must call it.

    Args:
        model: The converted model.
        group: The ranks that combine what they observed, for models that are replicated rather than sharded (DDP);
            sharded models know theirs.

    Optional under FSDP2; call it once per step where the model is not called through the module that was converted,
    and for models that are replicated. A second call without a new observation changes nothing. In compiled code it
    breaks the graph, once.
    """
    # disabled when called: the decorator would import the compiler with the package
    torch.compiler.disable(_synchronize_all)(model, group)


def settle_delayed_scales(model: nn.Module) -> int:
    """Cast in one pass from now on, where delayed scaling has a scale from an earlier step. All ranks call it.

    The first scale of an operand is made from its own values, so that its amax has to be found before it is cast; in
    later steps too, because only the device knows whether there is a scale. Call this once, after the second step: it
    asks the device, and waits for it. A compiled model compiles once more. The numbers stay the same, unless an operand
    is replaced by zeros alone later: its scale is 1 then, as with `initial="one"`. Loading a checkpoint and
    `reset_parameters` undo it.

    Args:
        model: The converted model, after a forward that followed an optimizer step.

    Returns:
        The number of operands without such a scale, which go on as before: those that were not observed, or were zero.

    Raises:
        Fp8Error: The model has no delayed scaling.
    """
    scales = delayed_scales(model)
    if not scales:
        raise Fp8Error("settle_delayed_scales needs a model with delayed scaling: no layer has a delayed scale.")
    return settle(scales)


def _synchronize_all(model: nn.Module, group: dist.ProcessGroup | None) -> None:
    if any(scale.owner is None for scale in delayed_scales(model)):
        synchronize_before_forward(model)  # copied layers: nobody has taken them yet
    for plan in plans_of(model):
        plan.synchronize_now(roll=True, group=group)
