"""Launch plans of the amax and the casts of a list of tensors at once; see `fp8_common._launch`."""

from fp8_common._formats import Format
from fp8_common._launch import LaunchPlan, fp8_type, input_type, tile_count

FOREACH_BLOCK, FOREACH_ITERS = 4096, 4
FOREACH_CHUNK = FOREACH_BLOCK * FOREACH_ITERS
# What both kernels read besides the addresses: per tensor its length, per program its tensor and its chunk.
_TABLE = {"numel_ptr": "i64", "tensor_ptr": "i32", "chunk_ptr": "i32"}


def foreach_chunks(sizes: list[int]) -> tuple[list[int], list[int]]:
    """Return, for every program of a foreach kernel, its tensor and its chunk of that tensor."""
    # A tensor without elements has no chunk, hence no program.
    pairs = [(t, c) for t, size in enumerate(sizes) for c in range(tile_count(size, FOREACH_CHUNK))]
    return [t for t, _ in pairs], [c for _, c in pairs]


def foreach_amax_plan(programs: int, dtype: str, *, aligned: bool) -> LaunchPlan:
    """Plan the int32 keys of max |x| of a list of tensors; `aligned`: all addresses are multiples of 16."""
    return LaunchPlan(
        kernel="foreach_amax",
        grid=programs,
        pointers={"ptrs_ptr": "i64", **_TABLE, "amax_ptr": "i32"},
        scalars={},
        constexprs={"DTYPE": input_type(dtype)} | _foreach_tile(aligned),
        num_warps=8,
        outputs=("amax_ptr",),
        zeroed=("amax_ptr",),
    )


def foreach_cast_plan(programs: int, dtype: str, fmt: str | Format, *, aligned: bool) -> LaunchPlan:
    """Plan y_t = fp8(x_t * scale[t]) for a list of tensors; all y_t lie in one buffer, each at its offset.

    `aligned`: the addresses of all x_t are multiples of 16. Offsets are multiples of 16 elements.
    """
    return LaunchPlan(
        kernel="foreach_cast",
        grid=programs,
        pointers={"ptrs_ptr": "i64", "offset_ptr": "i64", **_TABLE, "scale_ptr": "fp32", "y_ptr": fp8_type(fmt)},
        scalars={},
        constexprs={"DTYPE": input_type(dtype)} | _foreach_tile(aligned),
        num_warps=8,
        outputs=("y_ptr",),
    )


def _foreach_tile(aligned: bool) -> dict[str, object]:
    return {"ALIGNED": aligned, "BLOCK": FOREACH_BLOCK, "ITERS": FOREACH_ITERS}
