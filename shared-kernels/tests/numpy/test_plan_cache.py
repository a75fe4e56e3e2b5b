"""Launch plans are made once for the same arguments, and no other arguments get them."""

import dataclasses

import pytest

from fp8_common import CANONICAL, POWER_OF_2, get_format
from fp8_common import _launch_casts as casts
from fp8_common._launch_both import cast_both_plan
from fp8_common._launch_scales import scales_plan
from fp8_common._plan_cache import KEPT, remembered

PLANS = {
    "amax": lambda n=4096, dtype="bfloat16": casts.amax_plan(n, dtype),
    "cast": lambda n=4096, policy=CANONICAL: casts.cast_plan(n, "bfloat16", get_format("e4m3"), policy=policy),
    "cast_transpose": lambda n=64, fmt="e4m3": casts.cast_transpose_plan(n, 64, "bfloat16", get_format(fmt)),
    "rowwise": lambda n=64, policy=CANONICAL: casts.rowwise_plan(n, 64, "bfloat16", get_format("e4m3"), policy),
    "block": lambda n=64, rows=1: casts.block_plan(n, 128, "bfloat16", get_format("e4m3"), rows, CANONICAL),
    "both": lambda n=64, fold=False: cast_both_plan(n, 64, "bfloat16", get_format("e4m3"), fold=fold),
    "scales": lambda n=64, policy=CANONICAL: scales_plan(n, get_format("e4m3"), policy),
}
OTHERS = {"amax": "float32", "cast_transpose": "e5m2", "block": 128, "both": True}


@pytest.mark.parametrize("name", PLANS)
def test_the_same_arguments_give_the_same_plan_and_others_another(name):
    make = PLANS[name]
    plan = make()
    assert make() is plan
    for other in (make(8192), make(64 if name == "amax" else 4096, OTHERS.get(name, POWER_OF_2))):
        assert other is not plan
        assert dataclasses.asdict(other) != dataclasses.asdict(plan)


def test_old_plans_are_let_go():
    made = []
    make = remembered(lambda n: made.append(n) or object())
    first = make(0)
    assert make(0) is first
    for n in range(1, KEPT + 1):
        make(n)
    assert make(0) is not first
    assert made.count(0) == 2
