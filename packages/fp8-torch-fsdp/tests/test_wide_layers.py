"""Layers that stay in high precision by default, adapters, and convolutions, whose weights only travel in FP8."""

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import fp8_torch_fsdp as f8
from fp8_common import Fp8Error


class Corrected(nn.Module):
    """A layer with an adapter of rank 4, named as PEFT and torchtitan name theirs."""

    def __init__(self, first, second):
        super().__init__()
        self.base_layer = nn.Linear(32, 48)
        self.add_module(first, nn.ModuleDict({"default": nn.Linear(32, 4, bias=False)}))
        self.add_module(second, nn.ModuleDict({"default": nn.Linear(4, 48, bias=False)}))


@pytest.mark.parametrize("names", [("lora_A", "lora_B"), ("lora_a", "lora_b")])
def test_adapters_stay_wide_whatever_the_filter_says(names, caplog):
    caplog.set_level("INFO", "fp8_torch_fsdp")
    model = f8.convert_to_float8_training(nn.Sequential(Corrected(*names)), module_filter_fn=lambda layer, name: True)
    kinds = [type(module) for module in model.modules() if isinstance(module, nn.Linear)]
    assert kinds == [f8.Float8Linear, nn.Linear, nn.Linear]
    assert "2 an adapter (0.lora_" in caplog.text
    report = f8.float8_report(model)
    assert [count for _, why, count, _ in report.left if why == "adapter"] == [2]
    assert f8.enable_float8_all_gather(nn.Sequential(Corrected(*names))) == ["0.base_layer.weight"]


class Picture(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.patches, self.depth = nn.Conv2d(3, 16, 4, stride=4), nn.Conv1d(16, 16, 3, padding=1)
        self.linear = nn.Linear(16, 32)

    def forward(self, x):
        return self.linear(self.depth(self.patches(x).flatten(2)).transpose(1, 2))


def gathered(rank, world_size):
    model = f8.convert_to_float8_training(Picture())
    names = f8.enable_float8_all_gather(model)
    convolution = model.depth.weight.detach().clone().as_subclass(torch.Tensor)
    fully_shard(model)
    x = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(rank))
    model(x).square().mean().backward()
    finite = all(bool(p.grad.to_local().isfinite().all()) for p in model.parameters())
    wires = {w.name: w.wire for w in f8.float8_report(model).weights}
    model.unshard()
    low = model.depth.weight.detach()
    return (
        names,
        wires,
        finite,
        type(low) is torch.Tensor,
        float((low - convolution).abs().max() / convolution.abs().max()),
    )


@pytest.mark.distributed
def test_convolutions_beside_converted_layers_travel_in_fp8_after_one_call(run_ranks):
    for names, wires, finite, plain, error in run_ranks(2, gathered):
        assert names == ["patches.weight", "depth.weight"]
        assert {wires[name] for name in (*names, "linear.weight")} == {"float8_e4m3fn"}
        assert finite
        assert plain, "the layer computes with decoded values"
        assert 0 < error < 2**-4


def test_a_second_call_finds_nothing():
    model = Picture()
    f8.enable_float8_all_gather(model)
    with pytest.raises(Fp8Error, match="No parameter to gather in FP8"):
        f8.enable_float8_all_gather(model)
