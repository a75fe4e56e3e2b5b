"""The kernels that step and cast masters in their bytes, launched with PyTorch tensors; unrun on a GPU."""

import torch

from fp8_common._formats import Format
from fp8_common._launch_masters import PLANES, cast_masters_plan, step_masters_plan
from fp8_common.torch import _triton_backend as triton_backend


class KernelAdamW:
    """Steps of AdamW by a kernel: on every device the numbers of `fp8_common._adamw`, torch's fused ones on a CPU.

    Args:
        fmt: E4M3 or E5M2, the format of the codes.
    """

    def __init__(self, fmt: Format) -> None:
        self._fmt = fmt

    def step(
        self,
        codes: torch.Tensor,
        inverse: torch.Tensor,
        lower: torch.Tensor,
        gradient: torch.Tensor,
        moments: tuple[torch.Tensor, torch.Tensor],
        numbers: torch.Tensor,
    ) -> torch.Tensor:
        """Step numbers as `CompiledAdamW.step` does, n being a multiple of 16."""
        return step_masters(codes, inverse, lower, gradient, moments, numbers, self._fmt).view(())


def step_masters(
    codes: torch.Tensor,
    inverse: torch.Tensor,
    lower: torch.Tensor,
    gradient: torch.Tensor,
    moments: tuple[torch.Tensor, torch.Tensor],
    numbers: torch.Tensor,
    fmt: Format,
) -> torch.Tensor:
    """Make a step of AdamW with numbers in their bytes; arguments as of `CompiledAdamW.step`.

    Returns:
        int32 [1], the key of the largest magnitude after the step.
    """
    key = torch.zeros(1, dtype=torch.int32, device=codes.device)
    places = dict(zip(PLANES, (codes, *lower), strict=True))
    given = {"gradient_ptr": gradient, "inverse_ptr": inverse, "numbers_ptr": numbers, "amax_ptr": key}
    plan = step_masters_plan(codes.numel(), str(gradient.dtype).removeprefix("torch."), fmt)
    triton_backend.run(plan, codes.device, **places, **given, first_ptr=moments[0], second_ptr=moments[1])
    return key


def cast_masters(codes: torch.Tensor, scale: torch.Tensor, lower: torch.Tensor, fmt: Format) -> None:
    """Replace the highest bytes [n] of numbers by their codes, with one scale, float32 [1]."""
    places = dict(zip(PLANES, (codes, *lower), strict=True))
    triton_backend.run(cast_masters_plan(codes.numel(), fmt), codes.device, **places, scale_ptr=scale)
