"""Tensor parallelism whose activations, gradients and weights travel in FP8; styles for `parallelize_module`."""

from fp8_torch_fsdp.tensor_parallel.styles import (
    Float8ColwiseParallel,
    Float8RowwiseParallel,
    PrepareFloat8ModuleInput,
)

__all__ = ["Float8ColwiseParallel", "Float8RowwiseParallel", "PrepareFloat8ModuleInput"]
