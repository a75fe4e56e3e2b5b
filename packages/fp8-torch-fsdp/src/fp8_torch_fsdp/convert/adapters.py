"""Adapters: matrices of low rank beside layers, told by the names that PEFT and torchtitan give them.

They stay in high precision: what they add is small against the layer's output, they are too narrow for FP8 products,
and few bytes against the weights.
"""

from torch import nn


def adapters(model: nn.Module) -> set[nn.Module]:
    """Return the modules that `lora_A`, `lora_b` and the like lead to."""
    return {
        module
        for name, module in model.named_modules()
        if any(part.lower().startswith("lora_") for part in name.split("."))
    }
