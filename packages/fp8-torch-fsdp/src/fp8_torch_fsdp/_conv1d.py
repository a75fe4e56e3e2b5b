"""`Float8Conv1D`: the linear layer of GPT-2, whose weight Transformers keeps transposed, in FP8."""

from typing import Any

import torch
from torch import nn

from fp8_torch_fsdp._own_weights import Float8Weights
from fp8_torch_fsdp._weight_layout import WeightLayout


class Float8Conv1D(Float8Weights):
    """A `Conv1D` of Transformers, weight [in_features, out_features], whose products run in FP8."""


def is_conv1d(module: nn.Module) -> bool:
    """Return whether a module is Transformers' `Conv1D`, with the forward of that class."""
    forward: Any = type(module).forward
    return forward.__qualname__ == "Conv1D.forward" and forward.__module__ == "transformers.pytorch_utils"


def _forward(layer: Any, x: torch.Tensor) -> torch.Tensor:
    y = layer.weight_product("weight", x)
    return y + layer.bias.to(y.dtype)


CONV1D = WeightLayout(forward=_forward, weights=("weight",), transposed=True)
