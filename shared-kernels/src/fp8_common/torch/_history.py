"""The amax history of delayed scaling in torch; equal to `fp8_common._history` bit for bit."""

import torch

from fp8_common._amax import INF_KEY
from fp8_common._history import check_history
from fp8_common.torch._amax import as_float32, float_key


def update_history(history: torch.Tensor, amax: torch.Tensor, algo: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the history [L, ...] after one observation and the amax [...] for the next scale."""
    window, observed = as_float32(history, "history"), as_float32(amax, "amax").abs()
    check_history(tuple(window.shape), tuple(observed.shape), algo)
    # cat instead of a write into slot 0: one new tensor, nothing in place.
    rolled = torch.cat([observed[None], torch.roll(window, -1, 0)[1:]])
    # An observation that is not finite leaves the whole history of that tensor, unrolled.
    updated = torch.where(float_key(observed) >= INF_KEY, window, rolled)
    return updated, reduce_history(updated, algo)


def reduce_history(history: torch.Tensor, algo: str) -> torch.Tensor:
    """Return the amax [...] that the next scale is made from, of a history [L, ...]."""
    return torch.amax(float_key(history), dim=0).view(torch.float32) if algo == "max" else history[0].clone()
