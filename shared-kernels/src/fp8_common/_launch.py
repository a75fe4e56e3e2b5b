"""Launch plans of the Triton kernels: kernel, tile, programs, warps and arguments. Pure Python.

A plan follows from shapes, dtypes and formats alone. There is no autotuning: torch and JAX launch the same code, and
results do not depend on what ran before. Plans neither import triton nor hold data: `fp8_common._kernels` compiles
them.
"""

import dataclasses
from collections.abc import Mapping

import numpy as np

from fp8_common._errors import Fp8Error, Fp8UnsupportedError
from fp8_common._formats import E4M3, E5M2, Format, get_data_format
from fp8_common._plan_cache import remembered
from fp8_common._policy import CANONICAL, MxMode, ScalePolicy

MIN_CAPABILITY = (8, 9)
"""First CUDA compute capability with FP8 conversion instructions."""

TYPES = {
    "float16": "fp16",
    "bfloat16": "bf16",
    "float32": "fp32",
    "float8_e4m3fn": "fp8e4nv",
    "float8_e5m2": "fp8e5",
    "uint8": "u8",
    "int32": "i32",
    "int64": "i64",
}
"""Triton's name of each dtype."""

INPUTS = ("float16", "bfloat16", "float32")
FORMATS = (E4M3, E5M2)
LONGEST_ROW = 16384
"""Rows up to this length stay in the registers of one program."""

ScaleRule = tuple[str, int, int, int, bool, str, str, float]
"""(formula, eps key, lowest key, highest key, power_of_2, zero, nonfinite, factor after the division): a `ScalePolicy`
as plain values, which Triton can hash and compile into a kernel."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LaunchPlan:
    """One kernel launch, without its data. Two are the same if they are one object, which caches ask for.

    Attributes:
        kernel: Name in `fp8_common._kernels.KERNELS`.
        grid: Number of programs; 0 means that there is nothing to do.
        pointers: Triton element type of every pointer argument in order; None for those left out.
        scalars: (Triton type, value) of every scalar argument in order.
        constexprs: Values compiled into the kernel; dtypes by Triton's name.
        num_warps: Warps per program.
        outputs: Pointer arguments that the kernel writes.
        zeroed: Outputs that must hold zeros before.
        updated: Outputs that are read before.
    """

    kernel: str
    grid: int
    pointers: Mapping[str, str | None]
    scalars: Mapping[str, tuple[str, int]]
    constexprs: Mapping[str, object]
    num_warps: int
    outputs: tuple[str, ...]
    zeroed: tuple[str, ...] = ()
    updated: tuple[str, ...] = ()

    @property
    def inputs(self) -> tuple[str, ...]:
        """Pointer arguments that are only read and not left out, in order."""
        return tuple(name for name, kind in self.pointers.items() if kind and name not in self.outputs)


def supports(fmt: str | Format, policy: ScalePolicy | None = None) -> bool:
    """Return whether there are kernels for a format and a policy; the reference covers everything else."""
    return get_data_format(fmt) in FORMATS and (policy is None or policy.formula != "e8m0")


def check_capability(capability: tuple[int, int]) -> None:
    """Refuse GPUs without FP8 conversion.

    Raises:
        Fp8UnsupportedError: The compute capability is below 8.9.
    """
    if capability < MIN_CAPABILITY:
        raise Fp8UnsupportedError(
            f"The FP8 kernels need compute capability 8.9 or newer, got {capability[0]}.{capability[1]}. "
            "Set FP8_COMMON_BACKEND=reference (or auto) to use the framework's own operations."
        )


def scale_rule(fmt: str | Format, policy: ScalePolicy = CANONICAL) -> tuple[float, ScaleRule]:
    """Return (numerator, RULE): what kernels need to know about a policy. RULE is the same for all formats.

    Raises:
        Fp8Error: The policy makes E8M0 scales, which only `mx_plan` does.
    """
    if policy.formula == "e8m0":
        raise Fp8Error(f"Policy {policy.name!r} makes E8M0 scales: use mx_plan, or the reference.")
    fmax = get_data_format(fmt).max
    zero, nonfinite = policy.zero, policy.nonfinite
    factor = 1.0
    if policy.formula == "divide":
        # Multiplying the largest value by a power of two is exact, so the margin costs no second rounding.
        fmax = float(np.float32(fmax * 2.0**-policy.margin))
    elif policy.formula == "divide_then_margin":
        factor = 2.0**-policy.margin
    else:
        # DeepGEMM's formula covers zero, infinity and NaN by itself, whatever the policy's fields say.
        zero, nonfinite = "eps", "propagate"
    # Limits as int32 keys: the kernels compare bits, because a floating point minimum on a GPU drops NaN.
    keys = (key_of(policy.eps), key_of(policy.lower), key_of(policy.upper))
    return fmax, (policy.formula, *keys, policy.power_of_2, zero, nonfinite, factor)


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
    return LaunchPlan(  # 4096 elements in 8 warps: 16 a thread, in bfloat16 two loads of 16 bytes and one such store
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

    With `groups`, it has a row for each one that int32 `group_ptr` [m] names. `inverse` also returns the scales back.
    """
    constexprs = scale_constexprs(fmt, policy) | {"ALIGNED": n % 16 == 0}
    # Triton tiles have sides that are powers of two; what is beyond the row is masked.
    bn = max(16, _next_power_of_2(n))
    if n > LONGEST_ROW:  # too long for the registers of one program: read twice, in tiles
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
        # 64 elements a thread: with fewer, each thread's own computing of the row's scale is too large a share.
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


@remembered
def scales_plan(n: int, fmt: str | Format, policy: ScalePolicy) -> LaunchPlan:
    """Plan the scales into and back from FP8 of `n` float32 amax."""
    return LaunchPlan(
        kernel="scales",
        grid=tile_count(n, 256),
        pointers=dict.fromkeys(("amax_ptr", "scale_ptr", "scale_inv_ptr"), "fp32"),
        scalars={"n": ("i64", n)},
        constexprs=scale_constexprs(fmt, policy) | {"BLOCK": 256},
        num_warps=4,
        outputs=("scale_ptr", "scale_inv_ptr"),
    )


def delayed_update_plan(tensors: int, length: int, policy: ScalePolicy) -> LaunchPlan:
    """Plan a step of delayed scaling for all tensors at once: history [length, tensors]."""
    # A program holds the whole history of its tensors, padded to a power of two, in at most 4096 elements.
    rows = _next_power_of_2(length)
    columns = max(1, min(32, 4096 // rows))
    return LaunchPlan(
        kernel="delayed_update",
        grid=tile_count(tensors, columns),
        pointers=dict.fromkeys(
            ("history_ptr", "amax_ptr", "scale_ptr", "fmax_ptr", "new_history_ptr", "new_scale_ptr", "scale_inv_ptr"),
            "fp32",
        ),
        scalars={"T": ("i32", tensors), "L": ("i32", length)},
        # Any format: the rule is the same for all, and the numerators come as `fmax_ptr`.
        constexprs={"ALGO": policy.algo, "RULE": scale_rule(E4M3, policy)[1], "BL": rows, "BT": columns},
        num_warps=4,
        outputs=("new_history_ptr", "new_scale_ptr", "scale_inv_ptr"),
    )


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


FOREACH_BLOCK, FOREACH_ITERS = 4096, 4
FOREACH_CHUNK = FOREACH_BLOCK * FOREACH_ITERS
# What both read besides the addresses: per tensor its length, per program its tensor and its chunk.
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


def scale_constexprs(fmt: str | Format, policy: ScalePolicy | None) -> dict[str, object]:
    """Return what is compiled into a kernel that makes scales, or casts with a given one."""
    form = kernel_format(fmt)
    fmax, rule = (form.max, None) if policy is None else scale_rule(form, policy)
    return {"FMAX": fmax, "RULE": rule}


def matrix_sizes(m: int, n: int) -> dict[str, tuple[str, int]]:
    """Return the scalar arguments of a kernel on a matrix."""
    # Rows and columns are int32; the kernels compute offsets, which are products of both, in int64.
    if max(m, n) >= 1 << 31:
        raise Fp8Error(f"Kernels take matrices of fewer than 2^31 rows and columns, got {m} x {n}.")
    return {"M": ("i32", m), "N": ("i32", n)}


def input_type(dtype: str) -> str:
    """Return Triton's name of a dtype that kernels read and write."""
    if dtype not in INPUTS:
        raise Fp8Error(f"Kernels read and write {', '.join(INPUTS)}, got {dtype}. Convert it to float32 first.")
    return TYPES[dtype]


def fp8_type(fmt: str | Format) -> str:
    """Return Triton's name of a format."""
    return TYPES[kernel_format(fmt).dtype_name]


def kernel_format(fmt: str | Format) -> Format:
    """Return a format that kernels write, or refuse it."""
    form = get_data_format(fmt)
    if form not in FORMATS:
        raise Fp8Error(f"Kernels write e4m3 and e5m2, got {form.name}. Use the reference.")
    return form


def key_of(value: float) -> int:
    """Return the bits of a non-negative float32, ordered as its values are."""
    return int(np.float32(value).view(np.int32))


def tile_count(n: int, side: int) -> int:
    """Return the number of tiles of `side` that cover `n`."""
    return -(-n // side)


def _next_power_of_2(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()
