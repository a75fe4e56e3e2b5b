"""Launch plans of scales from amax, and of delayed scaling; see `fp8_common._launch`."""

from fp8_common._formats import E4M3, Format
from fp8_common._launch import LaunchPlan, next_power_of_2, scale_constexprs, scale_rule, tile_count
from fp8_common._plan_cache import remembered
from fp8_common._policy import ScalePolicy


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
    rows = next_power_of_2(length)
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
