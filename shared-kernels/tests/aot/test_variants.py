"""Kernel variants outside of the speed limits: odd shapes, unaligned tensors, every policy.

Their accesses are necessarily narrow, and a few bytes may be spilled; every check about numbers holds.
"""

import pytest

from fp8_common import CANONICAL, POWER_OF_2
from fp8_common import _launch_casts as casts
from fp8_common._launch_both import amax_both_plan, cast_both_plan
from fp8_common._launch_dequantize import dequantize_mx_plan, dequantize_plan
from fp8_common._launch_foreach import foreach_amax_plan, foreach_cast_plan
from fp8_common._launch_gradients import pack_gradients_plan, sum_gradients_plan
from fp8_common._launch_groups import clear_rows_plan, group_amax_plan, group_cast_plan, turn_rows_plan
from fp8_common._launch_scales import delayed_update_plan
from fp8_common.presets import deepgemm, flax, msamp, te_current, te_delayed, torchao
from tests.helpers import aot

KINDS = [("bfloat16", "e4m3"), ("float16", "e5m2"), ("float32", "e4m3")]
ODD = (300, 517)
LONG = (3, 20001)
VARIANTS = {
    "amax of few": lambda x, f: casts.amax_plan(1000, x),
    "cast + transpose": lambda x, f: casts.cast_transpose_plan(*ODD, x, f),
    "cast + transpose, M % 4": lambda x, f: casts.cast_transpose_plan(301, 517, x, f),
    "cast + transpose + amax, M % 4": lambda x, f: casts.cast_transpose_plan(301, 517, x, f, with_amax=True),
    "cast + transpose, M % 4, dynamic": lambda x, f: casts.cast_transpose_plan(301, 517, x, f, policy=CANONICAL),
    "rows and columns, amax": lambda x, f: amax_both_plan(*ODD, x),
    "rows and columns, amax, folded": lambda x, f: amax_both_plan(*ODD, x, fold=True),
    "rows and columns": lambda x, f: cast_both_plan(*ODD, x, f),
    "rows and columns, folded": lambda x, f: cast_both_plan(*ODD, x, f, fold=True),
    "row-wise": lambda x, f: casts.rowwise_plan(*ODD, x, f),
    "row-wise, folded": lambda x, f: casts.rowwise_plan(*ODD, x, f, fold=True),
    "row-wise, long": lambda x, f: casts.rowwise_plan(*LONG, x, f),
    "row-wise, long, folded": lambda x, f: casts.rowwise_plan(*LONG, x, f, fold=True),
    "row-wise, one column": lambda x, f: casts.rowwise_plan(7, 1, x, f),
    "1x128": lambda x, f: casts.block_plan(*ODD, x, f, 1),
    "128x128": lambda x, f: casts.block_plan(*ODD, x, f, 128),
    "128x128 + transpose": lambda x, f: casts.block_plan(*ODD, x, f, 128, transpose=True),
    "MX": lambda x, f: casts.mx_plan(*ODD, x, f),
    "dequantize, tensor": lambda x, f: dequantize_plan(*ODD, f, x, ODD),
    "dequantize, row": lambda x, f: dequantize_plan(*ODD, f, x, (1, ODD[1])),
    "dequantize, 128x128": lambda x, f: dequantize_plan(*ODD, f, x, (128, 128)),
    "dequantize, MX": lambda x, f: dequantize_mx_plan(*ODD, f, x),
    "pack gradients": lambda x, f: pack_gradients_plan(3, 517, (1034, 576), x, f),
    "pack gradients, stochastic, feedback": lambda x, f: pack_gradients_plan(
        3, 517, (517, 576), x, f, random=(7, 9), residual=True
    ),
    "sum gradients": lambda x, f: sum_gradients_plan(3, 517, 576, f, x, 3),
    "groups, amax": lambda x, f: group_amax_plan(*ODD, 5, x, columns=False),
    "groups": lambda x, f: group_cast_plan(*ODD, 5, x, f, columns=False),
    "columns of groups, amax": lambda x, f: group_amax_plan(*ODD, 5, x, columns=True),
    "columns of groups": lambda x, f: group_cast_plan(*ODD, 5, x, f, columns=True),
    "groups, folded, long": lambda x, f: casts.rowwise_plan(*LONG, x, f, fold=True, groups=True),
    "groups, turned": lambda x, f: turn_rows_plan(304, 517),
    "rows cleared": lambda x, f: clear_rows_plan(*ODD, x),
    "foreach amax": lambda x, f: foreach_amax_plan(9, x, aligned=False),
    "foreach cast": lambda x, f: foreach_cast_plan(9, x, f, aligned=False),
}
POLICIES = [
    CANONICAL, POWER_OF_2, te_delayed(margin=2), te_current(), te_current(True, 1e-6), torchao(), torchao(True),
    flax(margin=3), msamp(margin=1), deepgemm(), deepgemm(True),
]  # fmt: skip


def failures(plan, capability):
    """Return what is wrong with the numbers that the machine code of a plan computes."""
    case = aot.Case(name=plan.kernel, plan=plan, elements=1, read=0, written=0, narrow=1 << 20, memory_bound=False)
    return [message for message in aot.failures(aot.measure(case, capability)) if not message.startswith("spills")]


@pytest.mark.matrix(name=VARIANTS, capability=aot.ARCHITECTURES, kind=KINDS)
def test_every_variant_compiles_to_the_right_instructions(name, capability, kind):
    assert failures(VARIANTS[name](*kind), capability) == []


@pytest.mark.matrix(policy=POLICIES, capability=aot.ARCHITECTURES, fmt=["e4m3", "e5m2"])
def test_every_policy_compiles_to_the_right_instructions(policy, capability, fmt):
    assert failures(casts.rowwise_plan(64, 256, "bfloat16", fmt, policy), capability) == []


@pytest.mark.matrix(algo=["max", "most_recent"], length=[1, 3, 1024], capability=aot.ARCHITECTURES)
def test_every_window_compiles_to_the_right_instructions(algo, length, capability):
    assert failures(delayed_update_plan(37, length, te_delayed(algo=algo)), capability) == []
