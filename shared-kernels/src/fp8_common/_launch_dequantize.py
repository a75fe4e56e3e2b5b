"""Launch plans of the way back from FP8; see `fp8_common._launch`."""

from fp8_common._errors import Fp8Error
from fp8_common._formats import Format
from fp8_common._launch import LaunchPlan, fp8_type, input_type, matrix_sizes, tile_count


def dequantize_plan(m: int, n: int, fmt: str | Format, dtype: str, block: tuple[int, int]) -> LaunchPlan:
    """Plan q * RN(1 / scale) for q [m, n] with one scale per block (rows, columns).

    Raises:
        Fp8Error: No kernel has this block.
    """
    # 0 stands for the whole side: the kernel then needs no index into the scales along it.
    rows = 0 if block[0] >= m else block[0]
    columns = 0 if block[1] >= n else block[1]
    if columns not in (0, 128):
        raise Fp8Error(f"dequantize needs scales for whole rows or for 128 columns, got {block}. Use the reference.")
    return LaunchPlan(
        kernel="dequantize",
        grid=tile_count(m, 32) * tile_count(n, 128),
        pointers={"q_ptr": fp8_type(fmt), "scale_ptr": "fp32", "y_ptr": input_type(dtype)},
        scalars=matrix_sizes(m, n),
        constexprs={"ROWS": rows, "COLUMNS": columns, "ALIGNED": n % 16 == 0, "BM": 32, "BN": 128},
        num_warps=4,
        outputs=("y_ptr",),
    )


def dequantize_mx_plan(m: int, n: int, fmt: str | Format, dtype: str) -> LaunchPlan:
    """Plan the way back from MX data and its E8M0 codes."""
    return LaunchPlan(
        kernel="dequantize_mx",
        grid=tile_count(m, 16) * tile_count(n, 128),
        pointers={"q_ptr": fp8_type(fmt), "code_ptr": "u8", "y_ptr": input_type(dtype)},
        scalars=matrix_sizes(m, n),
        constexprs={"ALIGNED": n % 16 == 0, "BM": 16, "BN": 128},
        num_warps=4,
        outputs=("y_ptr",),
    )
