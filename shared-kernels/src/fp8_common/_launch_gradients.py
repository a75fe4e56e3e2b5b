"""Launch plans of the kernels for gradients that travel as codes; see `fp8_common._launch`."""

import math

from fp8_common._errors import Fp8Error
from fp8_common._formats import Format
from fp8_common._launch import (
    LaunchPlan,
    fp8_type,
    input_type,
    kernel_format,
    key_of,
    scale_constexprs,
    tile_count,
)
from fp8_common._policy import POWER_OF_2


def pack_gradients_plan(
    rows: int,
    columns: int,
    pitches: tuple[int, int],
    dtype: str,
    fmt: str | Format,
    *,
    random: tuple[int, int] | None = None,
    residual: bool = False,
) -> LaunchPlan:
    """Plan the codes and power-of-two scales of gradients [rows, columns] in the rows of a message.

    Args:
        rows: Ranks that get a row each.
        columns: Elements of a row.
        pitches: Elements from one row of the gradients to the next, bytes from one row of the message to the next.
        dtype: Of the gradients.
        fmt: The FP8 format.
        random: Seed and offset of the bits of stochastic rounding; None rounds to nearest.
        residual: Whether the bfloat16 `residual_ptr` [rows, columns] is added, and gets what rounding takes.
    """
    form = kernel_format(fmt)
    way = None if random is None else (key_of(form.max), form.min_exponent, form.mantissa_bits)
    # As in `block_plan`, 64 elements a thread; random bits and residuals need registers, so that there are fewer.
    blocks = 16 if random else 32 if residual else 64
    seed, offset = random or (0, 0)
    return LaunchPlan(
        kernel="pack_gradients",
        grid=rows * tile_count(columns, 128 * blocks),
        pointers={
            "x_ptr": input_type(dtype),
            "residual_ptr": "bf16" if residual else None,
            "y_ptr": fp8_type(fmt),
            "scale_ptr": "fp32",
        },
        scalars={
            "C": _int32(columns),
            "X_PITCH": ("i64", pitches[0]),
            "PITCH": ("i64", pitches[1]),
            "seed": ("i64", seed),
            "offset": ("i64", offset),
        },
        constexprs=scale_constexprs(fmt, POWER_OF_2)
        | {"RANDOM": way, "ALIGNED": columns % 16 == pitches[0] % 16 == 0, "BLOCKS": blocks},
        num_warps=4,
        outputs=("residual_ptr", "y_ptr", "scale_ptr") if residual else ("y_ptr", "scale_ptr"),
        updated=("residual_ptr",) if residual else (),
    )


def sum_gradients_plan(
    ranks: int, columns: int, pitch: int, fmt: str | Format, dtype: str, divisor: float
) -> LaunchPlan:
    """Plan the sum over the rows of a message of codes [ranks, columns], `pitch` bytes apart, divided by `divisor`."""
    # The quotient by a power of two and the product with its inverse are the same number.
    inverse = 1 / divisor if math.frexp(divisor)[0] == 0.5 else None
    return LaunchPlan(
        kernel="sum_gradients",
        grid=tile_count(columns, 128 * 16),
        pointers={"q_ptr": fp8_type(fmt), "scale_ptr": "fp32", "y_ptr": input_type(dtype)},
        scalars={"RANKS": ("i32", ranks), "C": _int32(columns), "PITCH": ("i64", pitch)},
        constexprs={"DIVISOR": divisor, "INVERSE": inverse, "ALIGNED": columns % 16 == 0, "BLOCKS": 16},
        num_warps=4,
        outputs=("y_ptr",),
    )


def _int32(n: int) -> tuple[str, int]:
    if n >= 1 << 31:
        raise Fp8Error(f"Kernels take rows of fewer than 2^31 elements, got {n}.")
    return "i32", n
