"""Launch plans of amax and of casts into FP8, with scales of tensors, rows and blocks; see `fp8_common._launch`."""

from fp8_common._errors import Fp8Error
from fp8_common._formats import Format
from fp8_common._launch import (
    LaunchPlan,
    fp8_type,
    input_type,
    kernel_format,
    key_of,
    matrix_sizes,
    next_power_of_2,
    scale_constexprs,
    tile_count,
)
from fp8_common._plan_cache import remembered
from fp8_common._policy import CANONICAL, MxMode, ScalePolicy

LONGEST_ROW = 16384
"""Rows up to this length stay in the registers of one program."""


@remembered
def amax_plan(n: int, dtype: str) -> LaunchPlan:
    """Plan the int32 key of max |x| of `n` elements."""
    # Several tiles a program mean fewer atomics on the one key; a small tensor needs the programs more.
    block, iters = 4096, 4 if n >= 1 << 22 else 1
    return LaunchPlan(
        kernel="amax",
        grid=tile_count(n, block * iters),
        pointers={"x_ptr": input_type(dtype), "amax_ptr": "i32"},
        scalars={"n": ("i64", n)},
        constexprs={"BLOCK": block, "ITERS": iters},
        num_warps=8,
        outputs=("amax_ptr",),
        zeroed=("amax_ptr",),
    )


@remembered
def cast_plan(
    n: int, dtype: str, fmt: str | Format, *, policy: ScalePolicy | None = None, with_amax: bool = False
) -> LaunchPlan:
    """Plan y = fp8(x * scale) for `n` elements.

    With a policy, `scale_ptr` is the int32 key from `amax_plan` and the scale is an output: dynamic scaling in two
    launches. Without, `scale_ptr` is the float32 scale. `with_amax` also returns the key of max |x|.
    """
    # 4096 elements in 8 warps: 16 a thread, two loads of 16 bytes each in bfloat16 and one such store.
    return LaunchPlan(
        kernel="cast",
        grid=tile_count(n, 4096),
        pointers=_cast_pointers(dtype, fmt, policy, with_amax, inverse=False, transpose=False),
        scalars={"n": ("i64", n)},
        constexprs=scale_constexprs(fmt, policy) | {"BLOCK": 4096},
        num_warps=8,
        outputs=_cast_outputs(policy, with_amax, inverse=False, transpose=False),
        zeroed=("amax_ptr",) if with_amax else (),
    )


@remembered
def cast_transpose_plan(
    m: int,
    n: int,
    dtype: str,
    fmt: str | Format,
    *,
    policy: ScalePolicy | None = None,
    with_amax: bool = False,
    inverse: bool = False,
) -> LaunchPlan:
    """Plan y = fp8(x * scale) and its transpose for x [m, n]; policy and `with_amax` as in `cast_plan`.

    `inverse` also returns the scale back from FP8 beside the one that a policy makes.
    """
    packed = m % 4 == 0
    # Four adjacent rows are packed into words, see `fp8_common._kernels.transpose`; 128 rows are 32 words, so that
    # the transpose is written in lines of 128 bytes. Without packing a square tile keeps both directions equal.
    bm, bn = (128, 64) if packed else (64, 64)
    return LaunchPlan(
        kernel="cast_transpose",
        grid=tile_count(m, bm) * tile_count(n, bn),
        pointers=_cast_pointers(dtype, fmt, policy, with_amax, inverse=inverse, transpose=True),
        scalars=matrix_sizes(m, n),
        constexprs=scale_constexprs(fmt, policy)
        | {"ALIGNED": m % 16 == n % 16 == 0, "PACKED": packed, "BM": bm, "BN": bn},
        num_warps=4,
        outputs=_cast_outputs(policy, with_amax, inverse=inverse, transpose=True),
        zeroed=("amax_ptr",) if with_amax else (),
    )


@remembered
def rowwise_plan(
    m: int,
    n: int,
    dtype: str,
    fmt: str | Format,
    policy: ScalePolicy = CANONICAL,
    *,
    fold: bool = False,
    groups: bool = False,
    inverse: bool = False,
) -> LaunchPlan:
    """Plan one scale per row of x [m, n]; with `fold`, columns are multiplied by float32 `fold_ptr` [n] first.

    With `groups`, `fold_ptr` has a row for each group, and int32 `group_ptr` [m] names the group of each row of x.
    `inverse` also returns the scales back from FP8.
    """
    constexprs = scale_constexprs(fmt, policy) | {"ALIGNED": n % 16 == 0}
    # Triton tiles have sides that are powers of two; what is beyond the row is masked.
    bn = max(16, next_power_of_2(n))
    if n > LONGEST_ROW:
        # Longer rows do not fit into the registers of one program: they are read twice, in tiles.
        kernel, grid, tile, warps = "rowwise_long", m, {"BN": 4096}, 8
    else:
        # Short rows share a program. A warp holds 1024 elements, 32 a thread, so that the longest row needs 16 warps.
        bm = max(1, 4096 // bn)
        kernel, grid, tile, warps = "rowwise", tile_count(m, bm), {"BM": bm, "BN": bn}, max(4, bm * bn // 1024)
    return LaunchPlan(
        kernel=kernel,
        grid=grid if n else 0,
        pointers={
            "x_ptr": input_type(dtype),
            "fold_ptr": "fp32" if fold else None,
            "group_ptr": "i32" if groups else None,
            "y_ptr": fp8_type(fmt),
            "scale_ptr": "fp32",
            "scale_inv_ptr": "fp32" if inverse else None,
        },
        scalars=matrix_sizes(m, n),
        constexprs=constexprs | tile,
        num_warps=warps,
        outputs=("y_ptr", "scale_ptr", "scale_inv_ptr")[: 3 if inverse else 2],
    )


@remembered
def block_plan(
    m: int,
    n: int,
    dtype: str,
    fmt: str | Format,
    rows: int,
    policy: ScalePolicy = CANONICAL,
    *,
    transpose: bool = False,
    inverse: bool = False,
) -> LaunchPlan:
    """Plan one scale per `rows` x 128 block of x [m, n]; `transpose` (128 rows, m % 4 == 0) also writes y^T.

    `inverse` also returns the scales back from FP8.

    Raises:
        Fp8Error: No kernel has this block, or the transpose cannot be had.
    """
    if rows not in (1, 128) or (transpose and (rows == 1 or m % 4)):
        raise Fp8Error(
            f"There are kernels for 1x128 and 128x128 blocks, and for the transpose of 128x128 ones if rows % 4 == 0; "
            f"got {rows}x128 of {m} rows with transpose={transpose}. Use the reference."
        )
    constexprs = scale_constexprs(fmt, policy)
    pointers: dict[str, str | None] = {"x_ptr": input_type(dtype), "y_ptr": fp8_type(fmt)}
    outputs: tuple[str, ...] = ("y_ptr", "scale_ptr")
    if rows == 1:
        # 64 elements a thread: with fewer, computing the row's scale in every thread is too large a share of the work.
        tile, aligned, bm, warps = {"BM": 64}, n % 16 == 0, 64, 4
    else:
        # Rows of the transpose start at multiples of m, so both sides must be multiples of 16.
        tile, aligned, bm, warps = {}, m % 16 == n % 16 == 0, 128, 8
        pointers["yt_ptr"] = fp8_type(fmt) if transpose else None
        outputs = ("y_ptr", "yt_ptr", "scale_ptr") if transpose else outputs
    outputs += ("scale_inv_ptr",) * inverse
    return LaunchPlan(
        kernel=f"block_{rows}x128",
        grid=tile_count(m, bm) * tile_count(n, 128),
        pointers=pointers | {"scale_ptr": "fp32", "scale_inv_ptr": "fp32" if inverse else None},
        scalars=matrix_sizes(m, n),
        constexprs=constexprs | {"ALIGNED": aligned} | tile,
        num_warps=warps,
        outputs=outputs,
    )


def mx_plan(m: int, n: int, dtype: str, fmt: str | Format, mode: MxMode = "rceil") -> LaunchPlan:
    """Plan OCP MX data and uint8 E8M0 codes [m, ceil(n / 32)] for x [m, n]."""
    form = kernel_format(fmt)
    return LaunchPlan(
        kernel="mx",
        grid=tile_count(m, 32) * tile_count(n, 128),
        pointers={"x_ptr": input_type(dtype), "y_ptr": fp8_type(fmt), "code_ptr": "u8"},
        scalars=matrix_sizes(m, n),
        constexprs={
            "MODE": mode,
            "MAX_KEY": key_of(form.max),
            "MANTISSA_BITS": form.mantissa_bits,
            "ALIGNED": n % 16 == 0,
            "BM": 32,
            "BN": 128,
        },
        num_warps=4,
        outputs=("y_ptr", "code_ptr"),
    )


def stochastic_plan(n: int, dtype: str, fmt: str | Format, seed: int = 0, offset: int = 0) -> LaunchPlan:
    """Plan stochastic rounding of x * scale for `n` elements; bits as in `fp8_common._philox`."""
    form = kernel_format(fmt)
    return LaunchPlan(
        kernel="stochastic",
        grid=tile_count(n, 2048),
        pointers={"x_ptr": input_type(dtype), "scale_ptr": "fp32", "y_ptr": fp8_type(fmt)},
        scalars={"n": ("i64", n), "seed": ("i64", seed), "offset": ("i64", offset)},
        constexprs={
            "MAX_KEY": key_of(form.max),
            "MIN_EXPONENT": form.min_exponent,
            "MANTISSA_BITS": form.mantissa_bits,
            "BLOCK": 2048,
        },
        num_warps=4,
        outputs=("y_ptr",),
    )


def _cast_pointers(
    dtype: str, fmt: str | Format, policy: ScalePolicy | None, with_amax: bool, *, inverse: bool, transpose: bool
) -> dict[str, str | None]:
    y = fp8_type(fmt)
    return {
        "x_ptr": input_type(dtype),
        "scale_ptr": "i32" if policy else "fp32",
        "y_ptr": y,
        **({"yt_ptr": y} if transpose else {}),
        "amax_ptr": "i32" if with_amax else None,
        "scale_out_ptr": "fp32" if policy else None,
        "scale_inv_ptr": "fp32" if policy and inverse else None,
    }


def _cast_outputs(policy: ScalePolicy | None, with_amax: bool, *, inverse: bool, transpose: bool) -> tuple[str, ...]:
    scales = {"scale_out_ptr": policy is not None, "scale_inv_ptr": policy is not None and inverse}
    wanted = {"y_ptr": True, "yt_ptr": transpose, "amax_ptr": with_amax} | scales
    return tuple(name for name, want in wanted.items() if want)
