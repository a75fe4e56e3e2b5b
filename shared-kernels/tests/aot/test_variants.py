"""Kernel variants outside of the speed limits: odd shapes, unaligned tensors, every policy.

Their accesses are necessarily narrow, and a few bytes may be spilled; every check about numbers holds.
"""

import pytest

from fp8_common import CANONICAL, POWER_OF_2
from fp8_common import _kernels as kernels
from fp8_common.presets import deepgemm, flax, msamp, te_current, te_delayed, torchao
from tests.helpers import aot

KINDS = [("bfloat16", "e4m3"), ("float16", "e5m2"), ("float32", "e4m3")]
ODD = (300, 517)
LONG = (3, 20001)
VARIANTS = {
    "amax of few": lambda x, f: kernels.amax(1000, x),
    "cast + transpose": lambda x, f: kernels.cast_transpose(*ODD, x, f),
    "cast + transpose, M % 4": lambda x, f: kernels.cast_transpose(301, 517, x, f),
    "cast + transpose + amax, M % 4": lambda x, f: kernels.cast_transpose(301, 517, x, f, with_amax=True),
    "cast + transpose, M % 4, dynamic": lambda x, f: kernels.cast_transpose(301, 517, x, f, policy=CANONICAL),
    "rows and columns, amax": lambda x, f: kernels.amax_both(*ODD, x),
    "rows and columns, amax, folded": lambda x, f: kernels.amax_both(*ODD, x, fold=True),
    "rows and columns": lambda x, f: kernels.cast_both(*ODD, x, f),
    "rows and columns, folded": lambda x, f: kernels.cast_both(*ODD, x, f, fold=True),
    "row-wise": lambda x, f: kernels.rowwise(*ODD, x, f),
    "row-wise, folded": lambda x, f: kernels.rowwise(*ODD, x, f, fold=True),
    "row-wise, long": lambda x, f: kernels.rowwise(*LONG, x, f),
    "row-wise, long, folded": lambda x, f: kernels.rowwise(*LONG, x, f, fold=True),
    "row-wise, one column": lambda x, f: kernels.rowwise(7, 1, x, f),
    "1x128": lambda x, f: kernels.blockwise(*ODD, x, f, 1),
    "128x128": lambda x, f: kernels.blockwise(*ODD, x, f, 128),
    "MX": lambda x, f: kernels.mx(*ODD, x, f),
    "dequantize, tensor": lambda x, f: kernels.dequantize(*ODD, f, x, ODD),
    "dequantize, row": lambda x, f: kernels.dequantize(*ODD, f, x, (1, ODD[1])),
    "dequantize, 128x128": lambda x, f: kernels.dequantize(*ODD, f, x, (128, 128)),
    "dequantize, MX": lambda x, f: kernels.dequantize_mx(*ODD, f, x),
    "pack gradients": lambda x, f: kernels.pack_gradients(3, 517, (1034, 576), x, f),
    "pack gradients, stochastic": lambda x, f: kernels.pack_gradients(3, 517, (517, 576), x, f, random=(7, 9)),
    "sum gradients": lambda x, f: kernels.sum_gradients(3, 517, 576, f, x, 3),
    "groups, amax": lambda x, f: kernels.group_amax(*ODD, 5, x, columns=False),
    "groups": lambda x, f: kernels.group_cast(*ODD, 5, x, f, columns=False),
    "columns of groups, amax": lambda x, f: kernels.group_amax(*ODD, 5, x, columns=True),
    "columns of groups": lambda x, f: kernels.group_cast(*ODD, 5, x, f, columns=True),
    "groups, folded, long": lambda x, f: kernels.rowwise(*LONG, x, f, fold=True, groups=True),
    "groups, turned": lambda x, f: kernels.turn_rows(304, 517),
    "rows cleared": lambda x, f: kernels.clear_rows(*ODD, x),
    "foreach amax": lambda x, f: kernels.foreach_amax(9, 9, x, aligned=False),
    "foreach cast": lambda x, f: kernels.foreach_cast(9, 4096, x, f, aligned=False),
}
POLICIES = [
    CANONICAL, POWER_OF_2, te_delayed(margin=2), te_current(), te_current(True, 1e-6), torchao(), torchao(True),
    flax(margin=3), msamp(margin=1), deepgemm(), deepgemm(True),
]  # fmt: skip


def failures(plan, capability):
    """Return what is wrong with the numbers that the machine code of a plan computes."""
    case = aot.Case(name=plan.name, plan=plan, elements=1, read=0, written=0, narrow=1 << 20, memory_bound=False)
    return [message for message in aot.failures(aot.measure(case, capability)) if not message.startswith("spills")]


@pytest.mark.matrix(name=VARIANTS, capability=aot.ARCHITECTURES, kind=KINDS)
def test_every_variant_compiles_to_the_right_instructions(name, capability, kind):
    assert failures(VARIANTS[name](*kind), capability) == []


@pytest.mark.matrix(policy=POLICIES, capability=aot.ARCHITECTURES, fmt=["e4m3", "e5m2"])
def test_every_policy_compiles_to_the_right_instructions(policy, capability, fmt):
    assert failures(kernels.rowwise(64, 256, "bfloat16", fmt, policy), capability) == []


@pytest.mark.matrix(algo=["max", "most_recent"], length=[1, 3, 1024], capability=aot.ARCHITECTURES)
def test_every_window_compiles_to_the_right_instructions(algo, length, capability):
    assert failures(kernels.delayed_update(37, length, te_delayed(algo=algo)), capability) == []
