"""FP8 primary weights of plain layers on a GPU: the codes of the CPU, masters that train.

Each test also runs on a CPU, where it proves its own program and nothing about a GPU.
"""

import pytest
import torch
from torch import nn

import fp8_te_init as fti
from tests.helpers.gpu import DEVICES, sync_debug
from tests.helpers.sharded_models import train_on

pytestmark = pytest.mark.parametrize("device", DEVICES)
RECIPES = ["tensorwise", "tensorwise_delayed", "rowwise", "blockwise"]


def plain(dtype=torch.bfloat16):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(256, 384, bias=False), nn.GELU(), nn.Linear(384, 128, bias=False)).to(dtype)


def on(device, **options):
    return fti.convert_linear(plain().to(device), **options)


@pytest.mark.parametrize("recipe", RECIPES)
def test_codes_are_those_of_the_cpu_and_masters_start_from_copies_on_the_host_and_train(recipe, device):
    here, model = fti.convert_linear(plain(), recipe=recipe), on(device, recipe=recipe)
    for source, layer, twin in zip(plain()[::2], here[::2], model[::2], strict=True):
        assert torch.equal(layer.weight.codes.view(torch.uint8), twin.weight.codes.view(torch.uint8).cpu())
        assert torch.equal(layer.weight.scale, twin.weight.scale.cpu())
        kept = twin.weight.get_high_precision_init_val()
        assert kept.device.type == "cpu"
        assert torch.equal(kept, source.weight)
    optimizer = fti.MasterOptimizer(torch.optim.AdamW, model.parameters(), lr=1e-3)
    fti.seed_masters(optimizer, model)
    for layer, source in zip(model[::2], plain()[::2], strict=True):
        assert torch.equal(optimizer.master_of(layer.weight).cpu(), source.weight.float())
    losses = train_on(model, optimizer, [torch.randn(64, 256, device=device, dtype=torch.bfloat16)] * 5)
    assert losses[-1] < losses[0]
    for layer in model[::2]:
        weight, master = layer.weight, optimizer.master_of(layer.weight)
        assert torch.equal(weight.state.quantized(master), weight.codes.view(torch.uint8))


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("fused", [False, True])
def test_the_host_does_not_wait_in_a_step_of_masters(recipe, fused, device):
    model = on(device, recipe=recipe)
    optimizer = fti.MasterOptimizer(torch.optim.AdamW, model.parameters(), lr=1e-3, fused=fused)
    x = torch.randn(64, 256, device=device, dtype=torch.bfloat16)
    for mode in ("default", "default", "error"):  # a first step makes states, and compares what it starts from
        with sync_debug(device, mode):
            (model(x).float() - 1).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
