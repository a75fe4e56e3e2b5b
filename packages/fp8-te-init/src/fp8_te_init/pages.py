"""Decides where host copies live: in pages of their own, which go back to the system when the copy is dropped.

Memory that comes from the allocator's heap stays with the process after it is freed. An anonymous mapping for each
tensor is unmapped with it, on every platform and without asking the allocator.
"""

import mmap

import torch

LEAST_BYTES = 1 << 16
"""Smaller copies come from the heap: a page each would waste more than it returns."""


def private_copy(values: torch.Tensor, *, pin: bool = False) -> torch.Tensor:
    """Return a contiguous host copy of `values`, on pages of its own if it is large.

    Args:
        values: Any tensor on any device.
        pin: Page-locked memory instead, for copies from and to a GPU; freed by CUDA's host allocator.
    """
    if pin:
        return torch.empty(values.shape, dtype=values.dtype, pin_memory=True).copy_(values)
    target = private_empty(values.shape, values.dtype)
    return target.copy_(values)


def private_empty(shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """Return an uninitialized (large ones: zero) host tensor on pages of its own if it is large."""
    nbytes = torch.Size(shape).numel() * dtype.itemsize
    if nbytes < LEAST_BYTES:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(mmap.mmap(-1, nbytes), dtype=dtype).view(shape)
