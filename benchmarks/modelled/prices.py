"""The time model: what bytes, FLOPs and launches cost on an H100 or H200, by assumptions that stand in the open.

Every launch takes the longer of its bytes at the memory's rate and its FLOPs at the tensor cores' rate; launches follow
each other. Nothing here was measured.
"""

import dataclasses

from benchmarks.modelled.record import Kernel, Step


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """Rates that a GPU is taken to reach.

    Attributes:
        bandwidth: Bytes per second: the data sheet's figure times a share that good kernels reach.
        flops: FLOPs per second of each kind of product.
    """

    bandwidth: float
    flops: dict[str, float]

    def faster(self, rate: str, factor: float) -> "Gpu":
        """Return the same GPU with one rate, "bandwidth" or a kind of product, so many times as high."""
        if rate == "bandwidth":
            return dataclasses.replace(self, bandwidth=self.bandwidth * factor)
        return dataclasses.replace(self, flops=self.flops | {rate: self.flops[rate] * factor})


SHARES = {"bandwidth": 0.90, "bf16": 0.70, "fp8": 0.65, "attention": 0.45}
"""The share of the data sheet's figure that is taken to be reached; attention is in bfloat16.

One share for FP8 whatever the scales and the accumulation: published block-scaled products reach less, 1.34 to 1.66
times bfloat16 instead of 1.86."""

_FLOPS = {"bf16": 990e12 * SHARES["bf16"], "fp8": 1979e12 * SHARES["fp8"], "attention": 990e12 * SHARES["attention"]}
GPUS = {
    "H100": Gpu(bandwidth=3.35e12 * SHARES["bandwidth"], flops=_FLOPS),
    "H200": Gpu(bandwidth=4.8e12 * SHARES["bandwidth"], flops=_FLOPS),
}
"""SXM, dense FLOPs."""

SECONDS_PER_LAUNCH = {"compiled": 0.0, "eager": 3e-6}
"""What a launch adds on the device: compiled steps are taken to be CUDA graphs."""


def seconds(step: Step, gpu: Gpu, mode: str) -> float:
    """Return the modelled time of a step."""
    busy = (
        sum(_kernel_seconds(kernel, gpu) for kernel in step.kernels) + (step.stored + step.read_again) / gpu.bandwidth
    )
    return busy + len(step.kernels) * SECONDS_PER_LAUNCH[mode]


def _kernel_seconds(kernel: Kernel, gpu: Gpu) -> float:
    computing = kernel.flops / gpu.flops[kernel.kind] if kernel.flops else 0.0
    return max(kernel.bytes / gpu.bandwidth, computing)


def assumptions() -> dict:
    """Return every figure of the model, for a result's file."""
    return {
        "share_of_data_sheet": SHARES,
        "bytes_per_second": {name: gpu.bandwidth for name, gpu in GPUS.items()},
        "flops_per_second": _FLOPS,
        "seconds_per_launch": SECONDS_PER_LAUNCH,
    }
