"""Host memory for copies: pages of their own, which go back to the system when the copy is dropped.

Memory that comes from the allocator's heap stays with the process after it is freed. An anonymous mapping for each
tensor is unmapped with it, on every platform and without asking the allocator. What work on the way leaves in the heap
(tens of MiB for residuals of large weights) goes back when glibc is asked.
"""

import contextlib
import ctypes
import functools
import mmap
from collections.abc import Callable

import torch

LEAST_BYTES = 1 << 16
"""Smaller copies come from the heap: a page each would waste more than it returns."""
TRIM_AFTER = 1 << 22
"""Bytes that may be freed one by one before the heap is trimmed, which takes about a millisecond."""


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
        pages = _anonymous_pages(nbytes)
    except OSError:  # no mapping is left: copies with free ones between them can still be too many to count as one
        return torch.empty(shape, dtype=dtype)
    # the tensor keeps the mapping alive, and the last tensor that goes unmaps it
    return torch.frombuffer(pages, dtype=dtype).view(shape)


def _anonymous_pages(nbytes: int) -> mmap.mmap:
    """Map zero pages of this process.

    A process may have some 65,000 mappings (vm.max_map_count). Linux counts private ones that lie side by side as
    one; each shared one, Python's default, counts.
    """
    if not hasattr(mmap, "MAP_ANONYMOUS"):  # Windows
        return mmap.mmap(-1, nbytes)
    pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        # a huge page would hold several copies, and stay until the last of them goes
        with contextlib.suppress(OSError):  # kernels without huge pages
            pages.madvise(mmap.MADV_NOHUGEPAGE)
    return pages


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


class FreedBytes:
    """Counts what is freed piece by piece, and asks the C library to return it from time to time.

    Small copies lie in the heap, which keeps what is freed there. At most `TRIM_AFTER` bytes wait.
    """

    def __init__(self) -> None:
        self._waiting = 0

    def add(self, nbytes: int) -> None:
        """Count bytes that were freed."""
        self._waiting += nbytes
        if self._waiting >= TRIM_AFTER:
            self._waiting = 0
            return_freed_memory()
