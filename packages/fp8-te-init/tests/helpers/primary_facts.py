"""What tests compare of FP8 primary weights and their masters, whole or sharded."""

import torch
from torch import nn

import fp8_te_init as fti
from fp8_common.torch.compat import local_of


def weights(model) -> list[nn.Parameter]:
    return [module.weight for module in model.modules() if isinstance(module, nn.Linear)]


def masters(model, optimizer) -> list[torch.Tensor]:
    return [optimizer.master_of(weight) for weight in weights(model)]


def codes(model) -> list[torch.Tensor]:
    """The codes of the rows that are held here."""
    return [local_of(weight).state.local_codes.clone() for weight in weights(model)]


def are_codes_of_masters(model, optimizer) -> bool:
    own = [local_of(weight).state for weight in weights(model)]
    made = [state.quantized(local_of(one)) for state, one in zip(own, masters(model, optimizer), strict=True)]
    return equal(made, codes(model))


def equal(ours, theirs) -> bool:
    """Whether tensors of two lists are equal in every bit."""
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def rounded(values, recipe="tensorwise") -> torch.Tensor:
    """Values after quantization as a new weight."""
    layer = nn.Linear(values.shape[1], values.shape[0], bias=False, dtype=values.dtype)
    with torch.no_grad():
        layer.weight.copy_(values)
    return fti.convert_linear(layer, recipe=recipe).weight.dequantize()
