"""The amax kernel: one pass over a tensor, a key per program, one atomic maximum each."""

import triton
import triton.language as tl

from fp8_common._kernels.device import narrow_key, widen_key


@triton.jit
def chunk_key(p, base, n, DTYPE: tl.constexpr, BLOCK: tl.constexpr, ITERS: tl.constexpr):
    """Float32 key of max |p[i]| for i in [base, base + BLOCK * ITERS), cut at n; whole chunks load without masks."""
    o = tl.arange(0, BLOCK)
    # Element by element over the chunk, in the width of the input; reduced and widened once, at the end.
    key = narrow_key(tl.zeros((BLOCK,), DTYPE))
    if base + BLOCK * ITERS <= n:
        # Unrolled, so that the loads of all iterations are in flight together.
        for i in tl.static_range(ITERS):
            key = tl.maximum(key, narrow_key(tl.load(p + base + i * BLOCK + o)))
    else:
        for i in range(ITERS):
            at = base + i * BLOCK + o
            key = tl.maximum(key, narrow_key(tl.load(p + at, mask=at < n, other=0.0)))
    return widen_key(tl.max(key, axis=0), DTYPE)


@triton.jit(do_not_specialize=["n"])
def amax_kernel(x_ptr, amax_ptr, n: tl.int64, BLOCK: tl.constexpr, ITERS: tl.constexpr):
    """Set amax[0] = max(amax[0], key of max |x|); `amax` is int32 and starts at zero."""
    base = tl.program_id(0).to(tl.int64) * (BLOCK * ITERS)
    key = chunk_key(x_ptr, base, n, x_ptr.dtype.element_ty, BLOCK, ITERS)
    # Integer maximum: exact and independent of the order of programs, so the result is deterministic. "relaxed" is
    # enough, as nothing else is published through this address; the next launch sees it.
    tl.atomic_max(amax_ptr, key, sem="relaxed")
