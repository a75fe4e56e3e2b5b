"""NaN for results of stale scales, without a host sync."""

import torch

from fp8_common import Format
from fp8_common.torch.compat import assert_on_device


def nan_if_stale(scale: torch.Tensor, stale: torch.Tensor, message: str) -> torch.Tensor:
    """Return the scale, or NaN if stale; raise on a CPU.

    A Python branch on `stale` would break compiled graphs and wait for the GPU, and a failed assertion on a GPU would
    end the process. Therefore a stale scale becomes NaN there, as do all results computed with it. It also becomes NaN
    on a CPU, because compilers that recompute a cast drop the assertion.

    Args:
        scale: float32, any shape.
        stale: bool scalar.
        message: Message of the error.

    Raises:
        RuntimeError: If the scale is stale and on a CPU.
    """
    if scale.device.type == "cpu":
        assert_on_device(~stale, message)
    return scale.masked_fill(stale, torch.nan)


def poison_codes_if_stale(codes: torch.Tensor, stale: torch.Tensor, fmt: Format) -> None:
    """Write NaN to the first row of codes if stale.

    Other ranks gather these codes and decode them with their own scale, which is not NaN.

    Args:
        codes: float8 [rows, ...], modified in place.
        stale: bool scalar.
        fmt: Format of the codes.
    """
    codes.view(torch.uint8)[:1].masked_fill_(stale, fmt.nan_code)
