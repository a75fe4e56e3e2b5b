"""Rebind forward wrappers of module instances when a module's class changes.

Transformers, torchtitan and Accelerate set `layer.forward` to a function that calls the previous forward, a bound
method of the former class. Without rebinding, a converted layer would continue to compute in high precision.
"""

import functools
from types import CellType, FunctionType, MethodType
from typing import Any

from torch import nn


def rebind(module: nn.Module, before: type) -> None:
    """Replace bound forwards of a module's former class in its attributes.

    Args:
        module: Module with its new class.
        before: Former class of the module.
    """
    for name, value in list(vars(module).items()):
        if _holds_method(value, module, set()):
            vars(module)[name] = _rebound(value, module, before, set())


def is_wrapped_around(module: nn.Module) -> bool:
    """Return whether an attribute of `module` holds its bound methods.

    Closures and `functools.partial` are searched. A forward set on the instance then probably calls the forward of the
    class.
    """
    return any(_holds_method(value, module, set()) for value in vars(module).values())


def _rebound(value: Any, module: nn.Module, before: type, visited: set[int]) -> Any:
    """Return a value with bound forwards replaced; closures are modified in place."""
    if isinstance(value, MethodType) and value.__self__ is module and value.__func__ is before.forward:
        return MethodType(type(module).forward, module)
    if isinstance(value, functools.partial):
        func, *args = (_rebound(argument, module, before, visited) for argument in (value.func, *value.args))
        named = {name: _rebound(argument, module, before, visited) for name, argument in value.keywords.items()}
        return functools.partial(func, *args, **named)
    for cell in _cells(value, visited):
        cell.cell_contents = _rebound(cell.cell_contents, module, before, visited)
    return value


def _holds_method(value: Any, module: nn.Module, visited: set[int]) -> bool:
    if isinstance(value, MethodType):
        return value.__self__ is module
    if isinstance(value, functools.partial):
        parts = (value.func, *value.args, *value.keywords.values())
        return any(_holds_method(part, module, visited) for part in parts)
    return any(_holds_method(cell.cell_contents, module, visited) for cell in _cells(value, visited))


def _cells(value: Any, visited: set[int]) -> list[Any]:
    """Return the filled closure cells of a function not in `visited`."""
    if not isinstance(value, FunctionType) or id(value) in visited:
        return []
    visited.add(id(value))
    empty = CellType()  # as for a variable that is not assigned yet; cells compare by their contents
    return [cell for cell in value.__closure__ or () if cell != empty]
