"""What an eager layer asks of the host, forward and backward, counted: Triton's driver launches nothing."""

import cProfile
import pstats

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import fp8_torch_fsdp as f8
from fp8_common.torch import _triton
from fp8_common.torch.linear import matmul, plan
from fp8_torch_fsdp.scales.delayed import delayed_scales
from tests.helpers.fsdp_models import converted

pytest.importorskip("triton")
from triton.runtime.driver import driver

from tests.helpers.triton_driver import Driver, unload

pytestmark = [
    pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION"),
    pytest.mark.skipif(_triton.plans().interpreting(), reason="the interpreter runs kernels without a driver"),
]
ROWS, DIM = 128, 512
MOST = {
    "tensorwise": (18, 6, 205),
    "tensorwise_delayed": (18, 4, 207),
    "rowwise": (34, 7, 248),
    "rowwise_with_gw_hp": (27, 3, 272),
    "blockwise": (33, 3, 230),
}
"""ATen operators, launches and calls of functions of one layer; of nn.Linear they are 8, 0 and 25."""


class Operators(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


@pytest.fixture
def gpu(monkeypatch):
    """CPU tensors go where those of a GPU would."""
    made = Driver()
    monkeypatch.setattr(driver, "_active", made)
    monkeypatch.setattr(_triton, "_obstacle", lambda device: None)
    monkeypatch.setattr(plan, "should_emulate", lambda device, emulate: False)
    monkeypatch.setattr(matmul, "multiplies_scaled_blocks", lambda device, mx: True)

    def scaled_mm(a, b, a_inv, b_inv, scaling, *, out_dtype, use_fast_accum=False):
        return torch.empty((a.shape[0], b.shape[1]), dtype=out_dtype)

    monkeypatch.setattr(matmul, "scaled_mm", scaled_mm)
    unload()
    yield made
    unload()


def counted(gpu, recipe, count):
    """Return operators, launches and calls of a steady forward and backward of so many layers."""
    layers = nn.Sequential(*(nn.Linear(DIM, DIM, bias=False, dtype=torch.bfloat16) for _ in range(count)))
    model = converted(layers, recipe)
    x, grad = (torch.randn(ROWS, DIM, dtype=torch.bfloat16) for _ in range(2))
    inputs = [x.requires_grad_(), *model.parameters()]

    def step():
        return torch.autograd.grad(model(x), inputs, grad)

    with torch.autograd.set_multithreading_enabled(False):
        for _ in range(2):
            step()
            if delayed_scales(model):
                f8.synchronize_scales(model)
        for scale in delayed_scales(model):
            scale.settled = True
        with Operators() as operators:
            step()
        gpu.launched.clear()
        step()
        launches, profile = len(gpu.launched), cProfile.Profile()
        profile.enable()
        step()
        profile.disable()
    return operators.count, launches, pstats.Stats(profile).total_calls


@pytest.mark.parametrize("recipe", MOST)
def test_a_layer_asks_little_of_the_host(gpu, recipe):
    few, many = (counted(gpu, recipe, count) for count in (1, 3))
    found = tuple((b - a) / 2 for a, b in zip(few, many, strict=True))
    print(recipe, found)
    assert all(own <= most for own, most in zip(found, MOST[recipe], strict=True)), found
