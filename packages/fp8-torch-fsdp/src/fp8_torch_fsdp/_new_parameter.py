"""Parameters that take the place of others: what users attached to one goes with it, and ties are found again."""

import weakref
from typing import Any

import torch
from torch import nn

from fp8_common.torch.plugin import hooks

_HOME = "_fp8_new_home"
_OWN = {"_data", "_state", _HOME, hooks.MARK}


def replaced_by(parameter: torch.Tensor, data: torch.Tensor, call: str) -> nn.Parameter:
    """Return a parameter of `data` in the place of `parameter`, with its gradient, hooks and attributes.

    Args:
        parameter: The one that the model holds until now. An optimizer that steps it raises from now on.
        data: What the new one holds; its values are those of `parameter`.
        call: The call that replaces it, for errors.
    """
    new = nn.Parameter(data, requires_grad=parameter.requires_grad)
    for name, value in vars(parameter).items():
        # `_data` and `_state` belong to an FP8 wrapper; the others say what became of the old parameter.
        if name not in _OWN:
            setattr(new, name, value)
    # set on the parameter itself and not in its `__dict__`, so not among the attributes above
    new.grad = parameter.grad
    for attached in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        # the dictionary itself: handles that users hold still remove their hooks
        if getattr(parameter, attached, None):
            setattr(new, attached, getattr(parameter, attached))
    hooks.mark_replaced(parameter, call)
    return new


def leave_address(parameter: torch.Tensor, module: nn.Module, name: str) -> None:
    """Note on a parameter that was replaced that `module` holds the one in its place as `name`."""
    old: Any = parameter
    setattr(old, _HOME, _Address(module, name))


def successor_of(parameter: torch.Tensor) -> nn.Parameter | None:
    """Return the parameter that took the place of this one in an earlier call, if the module that got it lives."""
    address = getattr(parameter, _HOME, None)
    return None if address is None else address.parameter


class _Address:
    """Where a parameter is. The module is held weakly, and the parameter not at all: torch swaps none that is.

    Pickles and copies of the parameter that has this as an attribute leave it behind.
    """

    def __init__(self, module: nn.Module | None = None, name: str = "") -> None:
        self._module = (lambda: None) if module is None else weakref.ref(module)
        self._name = name

    @property
    def parameter(self) -> nn.Parameter | None:
        module = self._module()
        return None if module is None else module._parameters.get(self._name)

    def __reduce__(self) -> tuple:
        return _Address, ()
