"""Launch plans of the kernels of exact masters in three bytes; see `fp8_common._launch`."""

from fp8_common._errors import Fp8Error
from fp8_common._formats import Format
from fp8_common._launch import LaunchPlan, fp8_type, input_type, kernel_format, tile_count

PLANES = ("code_ptr", "low_ptr", "middle_ptr", "high_ptr")
BLOCK = 2048


def step_masters_plan(n: int, dtype: str, fmt: str | Format) -> LaunchPlan:
    """Plan a step of AdamW with `n` numbers in their bytes, and the key of their amax; gradients have `dtype`."""
    _check(n)
    pointers = dict.fromkeys(PLANES, "u8") | {"gradient_ptr": input_type(dtype)}
    pointers |= dict.fromkeys(("first_ptr", "second_ptr", "inverse_ptr", "numbers_ptr"), "fp32")
    moments = ("first_ptr", "second_ptr")
    return LaunchPlan(
        kernel="step_masters",
        grid=tile_count(n, BLOCK),
        pointers=pointers | {"amax_ptr": "i32"},
        scalars={"n": ("i64", n)},
        constexprs={"ANCHORS": anchor_rule(fmt), "BLOCK": BLOCK},
        num_warps=4,
        outputs=(*PLANES, *moments, "amax_ptr"),
        zeroed=("amax_ptr",),
        updated=(*PLANES, *moments),
    )


def cast_masters_plan(n: int, fmt: str | Format) -> LaunchPlan:
    """Plan the codes of `n` numbers in the places of their highest bytes."""
    _check(n)
    return LaunchPlan(
        kernel="cast_masters",
        grid=tile_count(n, BLOCK),
        pointers=dict.fromkeys(PLANES, "u8") | {"scale_ptr": "fp32"},
        scalars={"n": ("i64", n)},
        constexprs={"F8": fp8_type(fmt), "BLOCK": BLOCK},
        num_warps=4,
        outputs=("code_ptr",),
        updated=("code_ptr",),
    )


def anchor_rule(fmt: str | Format) -> tuple[float, ...]:
    """Return what `fp8_common._remainder.anchors` is made of, as kernels take it."""
    form = kernel_format(fmt)
    smallest = form.smallest_subnormal
    ends = smallest * 9 / 32, smallest * 7 / 8, form.max * 7 / 4
    return 23 - form.mantissa_bits, 2.0 ** (127 - form.bias), form.max_code, *ends


def _check(n: int) -> None:
    if n % 16:
        raise Fp8Error(f"Kernels of masters take multiples of 16 numbers, got {n}. Use the reference.")
