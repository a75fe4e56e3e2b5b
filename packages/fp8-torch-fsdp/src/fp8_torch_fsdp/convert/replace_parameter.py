"""Replace parameters, and keep their gradient, hooks and attributes."""

import torch
from torch import nn

from fp8_common import Fp8Error
from fp8_common.torch_layers.sharding.replaced import MARK, mark_replaced

_OWN = {"plain", "info", MARK}
"""Attributes of an FP8 wrapper, and the mark of a replaced parameter."""


def replaced_by(parameter: torch.Tensor, data: torch.Tensor, call: str) -> nn.Parameter:
    """Return a parameter of `data` with `parameter`'s gradient, hooks and attributes.

    Args:
        parameter: The one that the model holds until now. An optimizer that steps it raises from now on.
        data: Tensor of the new parameter; its values equal `parameter`'s.
        call: The call that replaces it, for errors.
    """
    new = nn.Parameter(data, requires_grad=parameter.requires_grad)
    for name, value in vars(parameter).items():
        if name not in _OWN:
            setattr(new, name, value)
    # set on the parameter itself and not in its `__dict__`, so not among the attributes above
    new.grad = parameter.grad
    for attached in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        # the dictionary itself: handles that users hold still remove their hooks
        if getattr(parameter, attached, None):
            setattr(new, attached, getattr(parameter, attached))
    mark_replaced(parameter, call)
    return new


def raise_if_replaced(parameter: torch.Tensor | None, name: str) -> None:
    """Raise if another module's weight was replaced, which would break the tie.

    Args:
        parameter: A weight that is about to be converted.
        name: Its name, for the error.

    Raises:
        Fp8Error: An earlier call has replaced it elsewhere.
    """
    call = getattr(parameter, MARK, None)
    if call is not None:
        raise Fp8Error(
            f"{name} is shared with a layer for which {call} has made a new weight in an earlier call, so the two are "
            "no longer one. Convert the module that holds both in one call."
        )
