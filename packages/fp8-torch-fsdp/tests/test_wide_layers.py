"""Layers that stay in high precision by default: adapters."""

import pytest
from torch import nn

import fp8_torch_fsdp as f8


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
