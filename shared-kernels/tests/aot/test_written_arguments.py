"""What each kernel writes, as torch's compilers read it from Triton's code, is what its plan declares.

Inductor copies an argument that it takes for written: before the launch, and if that is a weight, back into it.
"""

from types import SimpleNamespace

import pytest
import torch
from torch._higher_order_ops import triton_kernel_wrap
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from benchmarks import _aot as aot

pytestmark = pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
PLANS = {case.name: case.plan for case in aot.cases()}


@pytest.fixture(autouse=True)
def hopper(monkeypatch):
    """Triton compiles for an H100; nothing is launched."""
    monkeypatch.setattr(driver, "_active", SimpleNamespace(get_current_target=lambda: GPUTarget("cuda", 90, 32)))


@pytest.mark.parametrize("name", PLANS)
def test_the_written_arguments_are_the_outputs(name):
    plan = PLANS[name]
    dtypes = dict(plan.inputs) | {output: out.dtype for output, out in plan.outputs.items()}
    given = {pointer: torch.empty(16, dtype=getattr(torch, dtypes[pointer])) for pointer in plan.pointers}
    found = triton_kernel_wrap.identify_accessed_tensors(plan.kernel, {**plan.fixed, **given}, {})
    assert {each.name for each in found.read_writes.writes} == set(plan.outputs)
