"""What becomes of a scale that must not be used any more, where only the device knows that it is stale."""

import torch


def nan_if_stale(scale: torch.Tensor, stale: torch.Tensor, message: str) -> torch.Tensor:
    """Return the scale, unless it is stale.

    No Python branch on a tensor: it would break graphs, and wait for a GPU. An assertion on a GPU would end its
    context, and with it the process; there a stale scale is NaN, and so is every result of it.

    Args:
        scale: float32, any shape.
        stale: bool scalar.
        message: What to do about it.

    Raises:
        RuntimeError: The scale is stale, on a CPU.
    """
    if scale.device.type != "cpu":
        return scale.masked_fill(stale, torch.nan)
    torch._assert_async(~stale, message)
    return scale
