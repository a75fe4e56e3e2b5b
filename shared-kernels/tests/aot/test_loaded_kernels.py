"""A kernel that was launched before gets the same arguments without Triton's look at them, or Triton looks again."""

import pytest
import torch
import triton
from triton.runtime.driver import driver

from benchmarks import _aot as aot
from fp8_common import _kernels as plans
from fp8_common._kernels.tensor import amax_kernel
from tests.helpers.triton_driver import Driver, unload

pytestmark = pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")


@pytest.fixture
def gpu(monkeypatch):
    made = Driver()
    monkeypatch.setattr(driver, "_active", made)
    unload()
    yield made
    unload()


def given(plan):
    dtypes = dict(plan.inputs) | {name: out.dtype for name, out in plan.outputs.items()}
    return {name: torch.empty(16, dtype=getattr(torch, dtypes[name])) for name in plan.pointers}


@pytest.mark.parametrize("name", {case.plan.kernel.__name__: case.name for case in aot.cases()}.values())
def test_a_second_launch_has_the_arguments_of_the_first(gpu, name):
    (plan,) = (case.plan for case in aot.cases() if case.name == name)
    tensors = given(plan)
    plans.run(plan, tensors)
    assert list(plan.loaded) == [None]
    plans.run(plan, tensors)
    first, second = gpu.arguments
    assert len(first) == len(second)
    assert all(a is b or a == b for a, b in zip(first, second, strict=True) if not isinstance(a, torch.Tensor))
    assert [id(a) for a in first if isinstance(a, torch.Tensor)] == [id(tensors[name]) for name in plan.pointers]
    assert [id(a) for a in second if isinstance(a, torch.Tensor)] == [id(tensors[name]) for name in plan.pointers]


def test_unusual_launches_go_through_triton(gpu, monkeypatch):
    plan, looked = plans.amax(64, "float32"), []
    run = type(amax_kernel).run
    monkeypatch.setattr(type(amax_kernel), "run", lambda *args, **named: (looked.append(1), run(*args, **named))[1])

    def looks(x):
        looked.clear()
        plans.run(plan, {"x_ptr": x, "amax_ptr": torch.zeros(4, dtype=torch.int32)})
        return bool(looked)

    x = torch.zeros(80)
    assert looks(x[1:65])  # what is not aligned is another kernel,
    assert not plan.loaded  # which is not kept
    assert looks(x[:64])
    assert not looks(x[:64])
    assert looks(x[1:65])
    hook = lambda metadata: None  # noqa: E731
    triton.knobs.runtime.launch_enter_hook.add(hook)
    try:
        assert looks(x[:64]), "profilers see launches"
    finally:
        triton.knobs.runtime.launch_enter_hook.remove(hook)
    assert not looks(x[:64])
