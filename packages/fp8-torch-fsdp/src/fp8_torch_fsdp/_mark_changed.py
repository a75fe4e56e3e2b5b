"""`mark_weights_changed`: says that weights were written to by their address, which nothing can see."""

import torch
from torch import nn

from fp8_common import Fp8Error
from fp8_torch_fsdp._counters import sharded_weights
from fp8_torch_fsdp._linear import Float8Linear


def mark_weights_changed(module: nn.Module) -> list[str]:
    """Say that the FP8 weights of a module were changed by address: by a kernel of your own, ctypes, another library.

    Writes by PyTorch operators, optimizers, `.data`, state dicts and collectives are seen without it. Call it after
    such a write and before the next forward, on every rank that holds a part of the weights; where ranks agree on
    scales, a call on some of them only is an error in the next forward, on all ranks.

    Args:
        module: A converted model or layer, sharded or not.

    Returns:
        The names of the weights, in the order of `module.named_modules()`.

    Raises:
        Fp8Error: No weight under `module` is one of an FP8 layer.
    """
    marked: dict[str, None] = {}
    for name, weight in sharded_weights(module):
        weight._state.mark_changed()
        marked[name] = None
    for name, layer in module.named_modules():
        if isinstance(layer, Float8Linear):
            # for weights that are not gathered in FP8: delayed scaling knows of writes to them by the version alone
            torch.autograd.graph.increment_version(getattr(layer.weight, "_local_tensor", layer.weight))
            marked[f"{name}.weight".lstrip(".")] = None
    if not marked:
        raise Fp8Error(f"{type(module).__name__} has no FP8 weight. Pass a model that convert_to_float8_training made.")
    return list(marked)
