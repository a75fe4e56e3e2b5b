"""What becomes of a scale that must not be used any more, where only the device knows that it is stale."""

import torch


def nan_unless(sound: torch.Tensor, scale: torch.Tensor, message: str) -> torch.Tensor:
    """Return the scale if it is sound.

    No Python branch on a tensor: it would break graphs, and wait for a GPU. An assertion on a GPU would end its
    context, and with it the process; there a stale scale is NaN, and so is every result of it.

    Args:
        sound: bool scalar.
        scale: float32, any shape.
        message: What to do about it.

    Raises:
        RuntimeError: `sound` is False, on a CPU.
    """
    if scale.device.type != "cpu":
        return torch.where(sound, scale, torch.nan)
    torch._assert_async(sound, message)
    return scale
