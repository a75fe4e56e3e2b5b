"""Launch plans of kernels on rows in groups; see `fp8_common._launch`."""

from fp8_common._errors import Fp8Error
from fp8_common._formats import Format
from fp8_common._launch import TYPES, LaunchPlan, fp8_type, input_type, matrix_sizes, tile_count
from fp8_common._plan_cache import remembered

PADDED = 16
"""What divides the rows of turned groups."""


@remembered
def group_amax_plan(m: int, n: int, groups: int, dtype: str, *, columns: bool) -> LaunchPlan:
    """Plan the int32 keys of the amax of each group of rows of x [m, n]: [groups], or of its `columns`, [groups, n]."""
    return LaunchPlan(
        kernel="group_amax",
        grid=tile_count(m, 128) * tile_count(n, 64),
        pointers={"x_ptr": input_type(dtype), "group_ptr": "i32", "amax_ptr": "i32"},
        scalars=_sizes(m, n, groups),
        constexprs={"COLUMNS": columns, "ALIGNED": n % 16 == 0, "BM": 128, "BN": 64},
        num_warps=4,
        outputs=("amax_ptr",),
        zeroed=("amax_ptr",),
    )


@remembered
def group_cast_plan(m: int, n: int, groups: int, dtype: str, fmt: str | Format, *, columns: bool) -> LaunchPlan:
    """Plan y = fp8(x * scale) for x [m, n] with float32 scales [groups], or of `columns`, [groups, n]."""
    return LaunchPlan(
        kernel="group_cast",
        grid=tile_count(m, 128) * tile_count(n, 64),
        pointers={"x_ptr": input_type(dtype), "group_ptr": "i32", "scale_ptr": "fp32", "y_ptr": fp8_type(fmt)},
        scalars=_sizes(m, n, groups),
        constexprs={"COLUMNS": columns, "ALIGNED": n % 16 == 0, "BM": 128, "BN": 64},
        num_warps=4,
        outputs=("y_ptr",),
    )


@remembered
def turn_rows_plan(p: int, n: int) -> LaunchPlan:
    """Plan the bytes [n, p], p a multiple of 16, of rows of n bytes that an int32 index [p] names."""
    if p % PADDED:
        raise Fp8Error(f"Rows are turned in multiples of {PADDED}, got {p}. Use the reference.")
    sizes = matrix_sizes(p, n)
    return LaunchPlan(
        kernel="turn_rows",
        grid=tile_count(p, 128) * tile_count(n, 64),
        pointers={"q_ptr": "u8", "source_ptr": "i32", "t_ptr": "u8"},
        scalars={"P": sizes["M"], "N": sizes["N"]},
        constexprs={"ALIGNED": n % 16 == 0, "BM": 128, "BN": 64},
        num_warps=4,
        outputs=("t_ptr",),
    )


@remembered
def clear_rows_plan(m: int, n: int, dtype: str) -> LaunchPlan:
    """Plan zeros in the rows of y [m, n] that bytes [m] of 0 name."""
    return LaunchPlan(
        kernel="clear_rows",
        grid=tile_count(m, 4) * tile_count(n, 1024),
        pointers={"y_ptr": input_type(dtype), "keep_ptr": TYPES["uint8"]},
        scalars={"M": ("i32", m), "N": ("i64", n)},
        constexprs={"ALIGNED": n % 16 == 0, "BM": 4, "BN": 1024},
        num_warps=4,
        outputs=("y_ptr",),
        updated=("y_ptr",),
    )


def _sizes(m: int, n: int, groups: int) -> dict[str, tuple[str, int]]:
    return {**matrix_sizes(m, n), "COUNT": ("i32", groups)}
