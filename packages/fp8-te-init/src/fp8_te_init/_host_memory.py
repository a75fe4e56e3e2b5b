"""Host memory for copies: pages of their own, which go back to the system when the copy is dropped.

Memory that comes from the allocator's heap stays with the process after it is freed. An anonymous mapping for each
tensor is unmapped with it, on every platform and without asking the allocator. What work on the way leaves in the heap
(tens of MiB for residuals of large weights) goes back when glibc is asked.
"""

import ctypes
import functools
import mmap
from collections.abc import Callable

import torch

LEAST_BYTES = 1 << 16
"""Smaller copies come from the heap: a page each would waste more than it returns."""


def mapped_copy(values: torch.Tensor, *, pin: bool = False) -> torch.Tensor:
    """Return a contiguous host copy of `values`, on pages of its own if it is large.

    Args:
        values: Any tensor on any device.
        pin: Page-locked memory instead, for copies from and to a GPU; freed by CUDA's host allocator.
    """
    if pin:
        return torch.empty(values.shape, dtype=values.dtype, pin_memory=True).copy_(values)
    target = mapped_empty(values.shape, values.dtype)
    return target.copy_(values)


def mapped_empty(shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """Return an uninitialized (large ones: zero) host tensor on pages of its own if it is large."""
    nbytes = torch.Size(shape).numel() * dtype.itemsize
    if nbytes < LEAST_BYTES:
        return torch.empty(shape, dtype=dtype)
    try:
        pages = mmap.mmap(-1, nbytes)
    except OSError:
        # a process may have some 65,000 mappings (vm.max_map_count); the heap needs none for each copy
        return torch.empty(shape, dtype=dtype)
    # the tensor keeps the mapping alive, and the last tensor that goes unmaps it
    return torch.frombuffer(pages, dtype=dtype).view(shape)


def return_freed_memory() -> bool:
    """Ask the C library to return freed heap memory to the system; say whether it was asked (glibc)."""
    trim = _malloc_trim()
    if trim is None:
        return False
    trim(0)
    return True


@functools.cache
def _malloc_trim() -> Callable[[int], int] | None:
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError, TypeError):  # another C library; Windows wants a name
        return None
    trim.argtypes = [ctypes.c_size_t]
    return trim
