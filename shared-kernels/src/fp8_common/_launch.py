"""What a launch plan of a Triton kernel is: kernel, tile, programs, warps and arguments. Pure Python.

A plan follows from shapes, dtypes and formats alone. There is no autotuning: torch and JAX launch the same code, and
results do not depend on what ran before. Plans neither import triton nor hold data: `fp8_common._kernels` compiles
them. The modules `fp8_common._launch_*` make them, each for a family of kernels, from what stands here.
"""

import dataclasses
from collections.abc import Mapping

import numpy as np

from fp8_common._errors import Fp8Error
from fp8_common._formats import E4M3, E5M2, Format, get_data_format
from fp8_common._policy import CANONICAL, ScalePolicy

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


def next_power_of_2(n: int) -> int:
    """Return the smallest power of two that is not below `n`, which the sides of Triton's tiles are."""
    return 1 << max(0, n - 1).bit_length()
