"""Forwards that a framework has put around that of one module: they follow the module when its class changes.

Transformers, torchtitan and Accelerate set `layer.forward` to a function that calls the forward of before, which is
bound to the layer. Without this a converted layer would go on computing in high precision.
"""

import functools
from collections.abc import Iterable
from types import FunctionType, MethodType
from typing import Any

from torch import nn


def rebind(module: nn.Module, before: type) -> None:
    """Let bound forwards of the class `before`, in attributes of `module`, be those of the class that it has now."""
    for name, value in list(vars(module).items()):
        changed = _rebound(value, module, before, set())
        if changed is not value:
            vars(module)[name] = changed


def is_wrapped_around(module: nn.Module) -> bool:
    """Return whether what was set as the forward of `module` calls that of its class, as far as can be seen."""
    return any(_holds_method(value, module) for value in vars(module).values())


def _rebound(value: Any, module: nn.Module, before: type, seen: set[int]) -> Any:
    """Return a value with bound forwards exchanged; closures are changed where they are."""
    if isinstance(value, MethodType) and value.__self__ is module and value.__func__ is before.forward:
        return MethodType(type(module).forward, module)
    if isinstance(value, functools.partial):
        parts = [_rebound(one, module, before, seen) for one in (value.func, *value.args)]
        named = {name: _rebound(one, module, before, seen) for name, one in value.keywords.items()}
        changed = _differ(parts, (value.func, *value.args)) or _differ(named.values(), value.keywords.values())
        return functools.partial(*parts, **named) if changed else value
    if isinstance(value, FunctionType) and id(value) not in seen:
        seen.add(id(value))
        for cell in value.__closure__ or ():
            for held in _contents(cell):
                changed = _rebound(held, module, before, seen)
                if changed is not held:
                    cell.cell_contents = changed
    return value


def _holds_method(value: Any, module: nn.Module) -> bool:
    if isinstance(value, MethodType):
        return value.__self__ is module
    if isinstance(value, functools.partial):
        return any(_holds_method(one, module) for one in (value.func, *value.args, *value.keywords.values()))
    cells = (value.__closure__ or ()) if isinstance(value, FunctionType) else ()
    return any(_holds_method(held, module) for cell in cells for held in _contents(cell))


def _differ(before: Iterable[Any], after: Iterable[Any]) -> bool:
    return any(one is not other for one, other in zip(before, after, strict=True))


def _contents(cell: Any) -> list[Any]:
    try:
        return [cell.cell_contents]
    except ValueError:  # not assigned yet
        return []
