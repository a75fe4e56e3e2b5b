"""CUDA graphs: whether a stream is being captured, and one sentence where a capture would need what it forbids."""

import torch

from fp8_common._errors import Fp8UnsupportedError


def is_capturing(device: torch.device) -> bool:
    """Return whether what is launched on `device` now goes into a CUDA graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def refuse(device: torch.device, what: str) -> None:
    """Refuse to make, during a capture, what has to be made before it.

    Args:
        device: Where it would be made.
        what: What it is, as the subject of a sentence.

    Raises:
        Fp8UnsupportedError: The current stream of `device` is being captured.
    """
    if is_capturing(device):
        raise refusal(what)


def refusal(what: str) -> Fp8UnsupportedError:
    """Return the error that says that `what` must be there before a capture."""
    return Fp8UnsupportedError(
        f"{what[0].upper()}{what[1:]} cannot be made while a CUDA graph is being captured. Run a training step with "
        "the same shapes and parameters before the capture."
    )
