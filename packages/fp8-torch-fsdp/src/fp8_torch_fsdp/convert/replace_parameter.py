"""`replaced_by`: builds new parameters from old ones; `raise_if_replaced`: checks ties.

A new parameter has the gradient, hooks and attributes of the old one.
"""

import torch
from torch import nn

from fp8_common import Fp8Error
from fp8_common.torch_layers.sharding.replaced import MARK, mark_replaced

_NOT_COPIED = {"plain", "fp8_weight", MARK}
"""Attributes of an FP8 wrapper, and the mark of a replaced parameter."""


def replaced_by(parameter: torch.Tensor, data: torch.Tensor, call: str) -> nn.Parameter:
    """Return a parameter of `data` with `parameter`'s gradient, hooks and attributes.

    Args:
        parameter: Parameter that the model held before. Optimizers that hold it raise at their next step.
        data: Tensor of the new parameter, with the values of `parameter`.
        call: Name of the call that replaces it, for errors.
    """
    new = nn.Parameter(data, requires_grad=parameter.requires_grad)
    for name, value in vars(parameter).items():
        if name not in _NOT_COPIED:
            setattr(new, name, value)
    # Gradient and hooks are not in the parameter's `__dict__`.
    new.grad = parameter.grad
    for hooks in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        # The dictionaries are shared, so that the users' handles can still remove their hooks.
        if getattr(parameter, hooks, None):
            setattr(new, hooks, getattr(parameter, hooks))
    mark_replaced(parameter, call)
    return new


def raise_if_replaced(parameter: torch.Tensor | None, name: str) -> None:
    """Raise if an earlier call replaced a weight in another module.

    The two modules shared the weight; converting it again would separate them.

    Args:
        parameter: Weight to convert.
        name: Name of the weight, for the error.

    Raises:
        Fp8Error: If an earlier call replaced it.
    """
    call = getattr(parameter, MARK, None)
    if call is not None:
        raise Fp8Error(
            f"{name} is shared with a layer whose weight an earlier call of {call} has replaced, so the layers no "
            "longer share it. Convert the module that contains both layers in one call."
        )
