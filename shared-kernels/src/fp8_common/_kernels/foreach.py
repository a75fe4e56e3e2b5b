"""Kernels for the amax and the cast of a list of tensors of one dtype in one launch.

The list is a table on the device: the address and length of every tensor, and for every program its tensor and which
chunk of it. No program exists for an empty tensor. Results lie in one buffer, so that a new buffer needs no new table.
"""

import triton
import triton.language as tl

from fp8_common._kernels.amax import chunk_key
from fp8_common._kernels.device import scaled, to_fp8


@triton.jit
def tensor_at(ptrs_ptr, t, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """The pointer in row t of a table of addresses; ALIGNED promises multiples of 16 bytes."""
    # Triton knows nothing about an address that it loads; the hint must follow the conversion to a pointer, or every
    # access handles a single element.
    p = tl.load(ptrs_ptr + t).to(tl.pointer_type(DTYPE))
    return tl.multiple_of(p, 16) if ALIGNED else p


@triton.jit
def foreach_amax_kernel(
    ptrs_ptr,
    numel_ptr,
    tensor_ptr,
    chunk_ptr,
    amax_ptr,
    DTYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
    ITERS: tl.constexpr,
):
    """Set amax[t] = max(amax[t], key of max |x_t|) for every tensor; `amax` is int32 [T] and starts at zero."""
    t = tl.load(tensor_ptr + tl.program_id(0))
    base = tl.load(chunk_ptr + tl.program_id(0)).to(tl.int64) * (BLOCK * ITERS)
    key = chunk_key(tensor_at(ptrs_ptr, t, DTYPE, ALIGNED), base, tl.load(numel_ptr + t), DTYPE, BLOCK, ITERS)
    tl.atomic_max(amax_ptr + t, key, sem="relaxed")


@triton.jit
def foreach_cast_kernel(
    ptrs_ptr,
    offset_ptr,
    numel_ptr,
    tensor_ptr,
    chunk_ptr,
    scale_ptr,
    y_ptr,
    DTYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
    ITERS: tl.constexpr,
):
    """Write fp8(x_t * scale[t]) from y[offset[t]] on for every tensor; `scale` is float32 [T].

    Offsets are int64 multiples of 16 elements.
    """
    F8: tl.constexpr = y_ptr.dtype.element_ty
    t = tl.load(tensor_ptr + tl.program_id(0))
    base = tl.load(chunk_ptr + tl.program_id(0)).to(tl.int64) * (BLOCK * ITERS)
    n, scale = tl.load(numel_ptr + t), tl.load(scale_ptr + t)
    # Without the hint, which follows the load because nothing is known about what it brings, stores would be narrow.
    x, y = tensor_at(ptrs_ptr, t, DTYPE, ALIGNED), y_ptr + tl.multiple_of(tl.load(offset_ptr + t), 16)
    o = tl.arange(0, BLOCK)
    if base + BLOCK * ITERS <= n:
        for i in tl.static_range(ITERS):
            at = base + i * BLOCK + o
            tl.store(y + at, to_fp8(scaled(tl.load(x + at), scale), F8))
    else:
        for i in range(ITERS):
            at = base + i * BLOCK + o
            value = tl.load(x + at, mask=at < n, other=0.0)
            tl.store(y + at, to_fp8(scaled(value, scale), F8), mask=at < n)
