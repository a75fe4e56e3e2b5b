"""Steps of masters in three bytes by the kernel, in Triton's interpreter: the bits of AdamW on float32 masters."""

import pytest
import torch
from torch import nn

import fp8_te_init as fti
from fp8_common.torch import _triton_masters as triton_masters


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("recipe", ["tensorwise", "tensorwise_delayed"])
def test_the_kernel_steps_masters_as_fused_adamw_on_a_cpu_does(monkeypatch, recipe, dtype):
    """With zeros, numbers that have to be listed, and numbers beyond what their scale can hold."""
    launched, launch = [], triton_masters.step_masters
    monkeypatch.setattr(triton_masters, "step_masters", lambda *a: (launched.append(a), launch(*a))[1])
    values = torch.randn(48, 32, generator=torch.Generator().manual_seed(1)) * 0.1
    values[0, :4] = torch.tensor([0.0, -0.0, 1e-30, 1e-12])
    values[45:] = torch.logspace(-20, -12, 96).view(3, 32)
    found = []
    for kept, backend in (("remainder", "triton"), ("float32", "reference")):
        monkeypatch.setenv("FP8_COMMON_BACKEND", backend)
        torch.manual_seed(0)
        with fti.primary_weights(recipe, preserve="cpu"):
            layer = nn.Linear(32, 48, bias=False, dtype=dtype)
        options = {"lr": 1e-2, "weight_decay": 0.02, "fused": True}
        optimizer = fti.MasterOptimizer(
            torch.optim.AdamW, layer.parameters(), masters=kept, compiled=kept == "remainder", **options
        )
        fti.seed_masters(optimizer, layer)
        optimizer.set_master(layer.weight, values)
        optimizer.write_back(step=False)
        generator = torch.Generator().manual_seed(3)
        for step in range(4):
            gradient = torch.randn(layer.weight.shape, generator=generator).to(dtype) * 10.0 ** (step - 2)
            gradient[0] = 0
            layer.weight.grad = gradient
            optimizer.step()
        state = optimizer.state[layer.weight]
        found.append((optimizer.master_of(layer.weight), layer.weight.codes, state["exp_avg"], state["exp_avg_sq"]))
    assert len(launched) >= 3, "all steps but the first"
    for ours, theirs in zip(*found, strict=True):
        assert torch.equal(ours, theirs)
