"""`DelayedScaling` and `CurrentScaling`: scales from the amax of earlier steps, or from the tensor itself."""

import dataclasses
from typing import Literal

from fp8_common import CANONICAL, E4M3, E4M3FNUZ, E5M2, E5M2FNUZ, POWER_OF_2, Format, Fp8Error, ScalePolicy
from fp8_common.plugin import Record

Fp8Format = Literal["HYBRID", "E4M3", "HYBRID_FNUZ", "E4M3_FNUZ"]
HistoryAlgo = Literal["max", "most_recent"]
Granularity = Literal["tensor", "row"]
KernelGradient = Literal["float32", "kernel"]
Tensor = Literal["input", "kernel", "output_grad"]
TENSORS: tuple[Tensor, ...] = ("input", "kernel", "output_grad")
"""The tensors of one product that are cast."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DelayedScaling(Record):
    """Scales that come from the amax of earlier steps; needs the leaves of `init_meta` for each product.

    Attributes:
        amax_history_length: How many observations the history holds, at least 1.
        margin: The scale aims at `max * 2^-margin` of the format; an integer from -16 to 16.
        amax_compute_algo: What stands for the history: its maximum ("max") or its newest entry ("most_recent").
        fp8_format: "HYBRID" takes E4M3 forward and E5M2 for gradients, "E4M3" takes E4M3 for all; "HYBRID_FNUZ" and
            "E4M3_FNUZ" take the formats of AMD MI300.
        kernel_gradient: The dtype of the product that gives a kernel's gradient, before its scale is applied: XLA adds
            the parts of several devices in it. "float32", or "kernel" for that of the kernel, which halves the bytes on
            the wire for a bfloat16 kernel and rounds once more. Other kernels keep "float32".
    """

    amax_history_length: int = 1024
    margin: int = 0
    amax_compute_algo: HistoryAlgo = "max"
    fp8_format: Fp8Format = "HYBRID"
    kernel_gradient: KernelGradient = "float32"

    def __post_init__(self) -> None:
        """Refuse values that no layer could honour."""
        self.check_choices()
        if type(self.amax_history_length) is not int or self.amax_history_length < 1:
            raise Fp8Error(f"amax_history_length must be an integer from 1 on, got {self.amax_history_length!r}.")
        _ = self.policy  # which checks the margin

    @property
    def policy(self) -> ScalePolicy:
        """The scale rule of `fp8_common` with these settings."""
        length, algo = self.amax_history_length, self.amax_compute_algo
        return dataclasses.replace(CANONICAL, margin=self.margin, history=length, algo=algo)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CurrentScaling(Record):
    """Scales that come from the tensor itself; needs no state.

    Attributes:
        granularity: One scale per tensor, or one per "row": per slice along the dimensions that a product sums
            over. Rows keep the operands in their own precision for the backward pass, where the rows are others.
        fp8_format: "HYBRID" takes E4M3 forward and E5M2 for gradients, "E4M3" takes E4M3 for all; "HYBRID_FNUZ" and
            "E4M3_FNUZ" take the formats of AMD MI300.
        power_of_2: Round scales down to powers of two.
        kernel_gradient: The dtype of the product that gives a kernel's gradient, before its scale is applied: XLA adds
            the parts of several devices in it. "float32", or "kernel" for that of the kernel, which halves the bytes on
            the wire for a bfloat16 kernel and rounds once more. Other kernels keep "float32".
    """

    granularity: Granularity = "tensor"
    fp8_format: Fp8Format = "HYBRID"
    power_of_2: bool = False
    kernel_gradient: KernelGradient = "float32"

    def __post_init__(self) -> None:
        """Refuse unknown names."""
        self.check_choices()

    @property
    def policy(self) -> ScalePolicy:
        """The scale rule of `fp8_common`: 1.0 for an amax that is zero or not finite."""
        return POWER_OF_2 if self.power_of_2 else CANONICAL


Scaling = DelayedScaling | CurrentScaling
FORMATS: dict[Fp8Format, tuple[Format, Format]] = {
    "HYBRID": (E4M3, E5M2),
    "E4M3": (E4M3, E4M3),
    "HYBRID_FNUZ": (E4M3FNUZ, E5M2FNUZ),
    "E4M3_FNUZ": (E4M3FNUZ, E4M3FNUZ),
}
"""The format forward and that of output gradients."""


def format_of(tensor: Tensor, scaling: Scaling) -> Format:
    """Return the format that a tensor is cast to."""
    forward, gradient = FORMATS[scaling.fp8_format]
    return gradient if tensor == "output_grad" else forward
