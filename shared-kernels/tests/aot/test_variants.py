"""Kernel variants outside of the speed limits: odd shapes, unaligned tensors, every policy.

Their accesses are necessarily narrow, and a few bytes may be spilled; every check about numbers holds.
"""

import pytest

from benchmarks import _aot as aot
from fp8_common import CANONICAL, POWER_OF_2
from fp8_common import _kernels as kernels
from fp8_common.presets import te_current, te_delayed

KINDS = [("bfloat16", "e4m3"), ("float16", "e5m2"), ("float32", "e4m3")]
ODD, LONG, TORN = (304, 517), (3, 20001), (301, 517)
PAIRS = enumerate(zip(aot.cases(), aot.cases(square=ODD), strict=True))
SHAPED = {odd.name: number for number, (usual, odd) in PAIRS if odd.plan is not usual.plan}
"""Where the kernels of `aot.cases` stand whose code depends on the shape."""
MORE = {
    "cast + transpose, M % 4": lambda x, f: kernels.cast_transpose(*TORN, x, f),
    "cast + transpose + amax, M % 4": lambda x, f: kernels.cast_transpose(*TORN, x, f, with_amax=True),
    "cast + transpose, M % 4, dynamic": lambda x, f: kernels.cast_transpose(*TORN, x, f, policy=CANONICAL),
    "row-wise, long": lambda x, f: kernels.rowwise(*LONG, x, f),
    "row-wise, long, folded": lambda x, f: kernels.rowwise(*LONG, x, f, fold=True),
    "row-wise, one column": lambda x, f: kernels.rowwise(7, 1, x, f),
    "groups, folded, long": lambda x, f: kernels.rowwise(*LONG, x, f, fold=True, groups=True),
    "sum gradients of three": lambda x, f: kernels.sum_gradients(3, 517, 576, f, x, 3),
    "foreach amax, unaligned": lambda x, f: kernels.foreach_amax(9, 9, x, aligned=False),
    "foreach cast, unaligned": lambda x, f: kernels.foreach_cast(9, 4096, x, f, aligned=False),
}
POLICIES = [
    CANONICAL, POWER_OF_2, te_delayed(margin=2), te_current(), te_current(True, 1e-6),
]  # fmt: skip


def failures(plan, capability):
    """Return what is wrong with the numbers that the machine code of a plan computes."""
    case = aot.Case(name=plan.name, plan=plan, elements=1, read=0, written=0, narrow=1 << 20, memory_bound=False)
    return [message for message in aot.failures(aot.measure(case, capability)) if not message.startswith("spills")]


@pytest.mark.matrix(name=[*SHAPED, *MORE], capability=aot.ARCHITECTURES, kind=KINDS)
def test_every_variant_compiles_to_the_right_instructions(name, capability, kind):
    plan = MORE[name](*kind) if name in MORE else aot.cases(*kind, square=ODD)[SHAPED[name]].plan
    assert failures(plan, capability) == []


@pytest.mark.matrix(policy=POLICIES, capability=aot.ARCHITECTURES, fmt=["e4m3", "e5m2"])
def test_every_policy_compiles_to_the_right_instructions(policy, capability, fmt):
    assert failures(kernels.rowwise(64, 256, "bfloat16", fmt, policy), capability) == []


@pytest.mark.matrix(algo=["max", "most_recent"], length=[1, 3, 1024], capability=aot.ARCHITECTURES)
def test_every_window_compiles_to_the_right_instructions(algo, length, capability):
    assert failures(kernels.delayed_update(37, length, te_delayed(algo=algo)), capability) == []
