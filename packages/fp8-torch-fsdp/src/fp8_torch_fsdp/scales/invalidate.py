"""Invalidate stale scales without a host sync."""

import torch

from fp8_common import Format
from fp8_common.torch.compat import assert_on_device


def nan_if_stale(scale: torch.Tensor, stale: torch.Tensor, message: str) -> torch.Tensor:
    """Return the scale, unless it is stale.

    No Python branch on a tensor: it would break graphs, and wait for a GPU. There an assertion would end the process:
    a stale scale is NaN, and so is every result of it. Compilers that recompute a cast leave assertions out, so it is
    NaN on a CPU too, where an assertion raises otherwise.

    Args:
        scale: float32, any shape.
        stale: bool scalar.
        message: What to do about it.

    Raises:
        RuntimeError: The scale is stale, on a CPU.
    """
    if scale.device.type == "cpu":
        assert_on_device(~stale, message)
    return scale.masked_fill(stale, torch.nan)


def poison_codes_if_stale(codes: torch.Tensor, stale: torch.Tensor, fmt: Format) -> None:
    """Write NaN to the first row of codes with a stale scale.

    Other ranks gather these codes.

    They have the scale that this rank does not use any more.

    Args:
        codes: float8 [rows, ...], changed in place.
        stale: bool scalar.
        fmt: Their format.
    """
    codes.view(torch.uint8)[:1].masked_fill_(stale, fmt.nan_code)
