"""The cast kernel: multiply by one scale and round to FP8 in one pass, with or without the input's amax."""

import triton
import triton.language as tl

from fp8_common._kernels.device import narrow_key, scale_of_key, scaled, store_reciprocal, to_fp8, widen_key


@triton.jit
def tensor_scale(scale_ptr, scale_out_ptr, scale_inv_ptr, FMAX: tl.constexpr, RULE: tl.constexpr):
    """The given scale, or (with a RULE) the one made from an int32 amax key, which the first program also stores."""
    if RULE is None:
        return tl.load(scale_ptr)
    else:
        # Every program computes the scale again: a few instructions, where a kernel of its own would be another launch.
        scale = scale_of_key(tl.load(scale_ptr), 1.0, FMAX, RULE)
        if tl.program_id(0) == 0:
            tl.store(scale_out_ptr, scale)
            store_reciprocal(scale_inv_ptr, 0, scale, None)
        return scale


@triton.jit(do_not_specialize=["n"])
def cast_kernel(
    x_ptr,
    scale_ptr,
    y_ptr,
    amax_ptr,
    scale_out_ptr,
    scale_inv_ptr,
    n: tl.int64,
    FMAX: tl.constexpr,
    RULE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute y = fp8(x * scale); amax key of x into `amax` unless that is None.

    With a RULE, `scale` holds the int32 key of the amax of x, and tiles are walked backwards.
    """
    scale = tensor_scale(scale_ptr, scale_out_ptr, scale_inv_ptr, FMAX, RULE)
    # With a RULE the amax kernel has just read x, and its end is what the L2 cache still holds: begin there.
    tile = tl.program_id(0) if RULE is None else tl.num_programs(0) - 1 - tl.program_id(0)
    base = tile.to(tl.int64) * BLOCK
    at = base + tl.arange(0, BLOCK)
    F8: tl.constexpr = y_ptr.dtype.element_ty
    if base + BLOCK <= n:
        x = tl.load(x_ptr + at)
        tl.store(y_ptr + at, to_fp8(scaled(x, scale), F8))
    else:
        x = tl.load(x_ptr + at, mask=at < n, other=0.0)
        tl.store(y_ptr + at, to_fp8(scaled(x, scale), F8), mask=at < n)
    if amax_ptr is not None:
        key = widen_key(tl.max(narrow_key(x), axis=0), x_ptr.dtype.element_ty)
        tl.atomic_max(amax_ptr, key, sem="relaxed")
