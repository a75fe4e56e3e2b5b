"""Launch plans of casts of rows and columns from two reads; see `fp8_common._launch`."""

from fp8_common._formats import Format
from fp8_common._launch import LaunchPlan, fp8_type, input_type, matrix_sizes, tile_count
from fp8_common._plan_cache import remembered


@remembered
def amax_both_plan(m: int, n: int, dtype: str, *, fold: bool = False) -> LaunchPlan:
    """Plan the int32 keys of the amax of all rows and of all columns of x [m, n]; `fold` as in `rowwise_plan`.

    Rows are multiplied by `fold_ptr`, columns are not.
    """
    return LaunchPlan(
        kernel="amax_both",
        grid=tile_count(m, 128) * tile_count(n, 128),
        pointers={
            "x_ptr": input_type(dtype),
            "fold_ptr": "fp32" if fold else None,
            "row_ptr": "i32",
            "column_ptr": "i32",
        },
        scalars=matrix_sizes(m, n),
        constexprs={"ALIGNED": m % 16 == n % 16 == 0, "BM": 128, "BN": 128},
        num_warps=8,
        outputs=("row_ptr", "column_ptr"),
        zeroed=("row_ptr", "column_ptr"),
    )


@remembered
def cast_both_plan(m: int, n: int, dtype: str, fmt: str | Format, *, fold: bool = False) -> LaunchPlan:
    """Plan casts of x [m, n], m % 4 == 0, with float32 scales of its rows, and with those of its columns, turned."""
    return LaunchPlan(
        kernel="cast_both",
        grid=tile_count(m, 128) * tile_count(n, 64),
        pointers={
            "x_ptr": input_type(dtype),
            "fold_ptr": "fp32" if fold else None,
            "row_ptr": "fp32",
            "column_ptr": "fp32",
            "y_ptr": fp8_type(fmt),
            "yt_ptr": fp8_type(fmt),
        },
        scalars=matrix_sizes(m, n),
        # the tile of `cast_transpose_plan`, for the same reason
        constexprs={"ALIGNED": m % 16 == n % 16 == 0, "BM": 128, "BN": 64},
        num_warps=4,
        outputs=("y_ptr", "yt_ptr"),
    )
