"""Launch plans of casts of rows and columns, and of delayed scales in use; see `fp8_common._launch`."""

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


@remembered
def delayed_current_plan(*, record: bool, check: bool) -> LaunchPlan:
    """Plan the scale in use of one operand under delayed scaling, which is NaN if `check` and `late_ptr` is set.

    `record` raises `own_key_ptr` to the operand's amax key.
    """
    return LaunchPlan(
        kernel="delayed_current",
        grid=1,
        pointers={
            "key_ptr": "i32" if record else None,
            "scale_ptr": "fp32",
            "late_ptr": "u8" if check else None,
            "own_key_ptr": "i32" if record else None,
            "current_ptr": "fp32",
            "scale_inv_ptr": "fp32",
        },
        scalars={},
        constexprs={"RECORD": record, "CHECK": check},
        num_warps=1,
        outputs=("own_key_ptr", "current_ptr", "scale_inv_ptr") if record else ("current_ptr", "scale_inv_ptr"),
        updated=("own_key_ptr",) if record else (),
    )
