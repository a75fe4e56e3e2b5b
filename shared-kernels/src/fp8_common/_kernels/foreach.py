"""Kernels for amax and cast of many tensors in one launch.

All tensors have the same dtype. A table on the device lists the address and length of each tensor, and the tensor and
chunk of each program. An empty tensor has no program. The codes of all tensors are in one buffer, at offsets from the
table, so that a new buffer needs no new table.
"""

from collections.abc import Sequence

import triton
import triton.language as tl

from fp8_common._kernels.device import scaled, to_fp8
from fp8_common._kernels.launch import Launch, Out, codes, input_dtype, plan, tile_count
from fp8_common._kernels.tensor import chunk_key
from fp8_common.formats import Format

BLOCK, ITERS = 4096, 4
TABLE = {"numel_ptr": "int64", "tensor_ptr": "int32", "chunk_ptr": "int32"}
"""Dtypes of the table except addresses: length of each tensor; tensor and chunk of each program."""


@triton.jit
def tensor_at(ptrs_ptr, t, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """Load the pointer to tensor t from a table of addresses.

    ALIGNED promises that the address is a multiple of 16 bytes.
    """
    # Triton assumes nothing about a loaded address. The hint must follow the conversion to a pointer, otherwise every
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
    """Raise amax[t] to the key of max |x_t|, for all tensors.

    `amax` is int32 [T] and is zero before the launch.
    """
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
    """Write fp8(x_t * scale[t]) to y[offset[t]:], for all tensors.

    `scale` is float32 [T]. `offset` is int64 [T], in elements of y; each is a multiple of 16.
    """
    F8: tl.constexpr = y_ptr.dtype.element_ty
    t = tl.load(tensor_ptr + tl.program_id(0))
    base = tl.load(chunk_ptr + tl.program_id(0)).to(tl.int64) * (BLOCK * ITERS)
    n, scale = tl.load(numel_ptr + t), tl.load(scale_ptr + t)
    # Without the hint after the load, stores would be narrow.
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


def foreach_chunks(sizes: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return the tensor and the chunk of each program, from tensor sizes."""
    # A tensor without elements has no chunk, hence no program.
    pairs = [(t, c) for t, size in enumerate(sizes) for c in range(tile_count(size, BLOCK * ITERS))]
    return [t for t, _ in pairs], [c for _, c in pairs]


@plan
def foreach_amax(programs: int, tensors: int, dtype: str, *, aligned: bool) -> Launch:
    """Plan the int32 keys [tensors] of max |x| of many tensors.

    Args:
        programs: Programs in the table, see `foreach_chunks`.
        tensors: Number of tensors.
        dtype: dtype of all tensors.
        aligned: Whether the addresses of all tensors are multiples of 16 bytes.
    """
    return Launch(
        kernel=foreach_amax_kernel,
        grid=programs,
        inputs={"ptrs_ptr": "int64", **TABLE},
        outputs={"amax_ptr": Out((tensors,), "int32", zeroed=True)},
        scalars={},
        constants=_tile(dtype, aligned),
        num_warps=8,
    )


@plan
def foreach_cast(programs: int, elements: int, dtype: str, fmt: str | Format, *, aligned: bool) -> Launch:
    """Plan y_t = fp8(x_t * scale[t]) of many tensors.

    All y_t are in one buffer, each at its offset, a multiple of 16 elements.

    Args:
        programs: Programs in the table, see `foreach_chunks`.
        elements: Size of the buffer.
        dtype: dtype of all x_t.
        fmt: FP8 format.
        aligned: Whether the addresses of all x_t are multiples of 16 bytes.
    """
    return Launch(
        kernel=foreach_cast_kernel,
        grid=programs,
        inputs={"ptrs_ptr": "int64", "offset_ptr": "int64", **TABLE, "scale_ptr": "float32"},
        outputs={"y_ptr": codes((elements,), fmt)},
        scalars={},
        constants=_tile(dtype, aligned),
        num_warps=8,
    )


def _tile(dtype: str, aligned: bool) -> dict[str, object]:
    # The dtype of the tensors is compiled in, because the table has only their addresses.
    return {"DTYPE": getattr(tl, input_dtype(dtype)), "ALIGNED": aligned, "BLOCK": BLOCK, "ITERS": ITERS}
