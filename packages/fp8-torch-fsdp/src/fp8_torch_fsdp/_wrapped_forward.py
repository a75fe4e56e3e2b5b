"""Forwards that a framework has put around that of one layer: the same, around the layer that takes its place.

Transformers, torchtitan and Accelerate set `layer.forward` to a function that calls the forward of before, which is
bound to the layer. A converted layer that took such a function over as it is would compute in high precision.
"""

import functools
from types import CellType, FunctionType, MethodType
from typing import Any

from torch import nn


def is_wrapped_around(layer: nn.Module) -> bool:
    """Return whether what was set as the forward of `layer` calls that of its class, as far as can be seen."""
    return any(_holds_method(value, layer) for value in vars(layer).values())


def rebound(value: Any, old: nn.Module, new: nn.Module) -> Any:
    """Return a callable like `value` that works with `new` where it worked with `old`; `value` itself if it does not.

    Args:
        value: A function, a method or a partial; anything else is returned as it is.
        old: The layer in closures and arguments now.
        new: What takes its place there; its class says which method is meant.
    """
    if value is old:
        return new
    if isinstance(value, MethodType) and value.__self__ is old:
        return MethodType(getattr(type(new), value.__name__, value.__func__), new)
    if isinstance(value, functools.partial):
        parts = [rebound(one, old, new) for one in (value.func, *value.args)]
        named = {name: rebound(one, old, new) for name, one in value.keywords.items()}
        changed = _differ((value.func, *value.args), parts) or _differ(value.keywords.values(), named.values())
        return functools.partial(*parts, **named) if changed else value
    if not isinstance(value, FunctionType) or not value.__closure__:
        return value
    cells = [_cell(cell, old, new) for cell in value.__closure__]
    if not _differ(value.__closure__, cells):
        return value
    code, defaults = value.__code__, value.__defaults__
    twin = FunctionType(code, value.__globals__, value.__name__, defaults, tuple(cells))
    twin.__kwdefaults__ = value.__kwdefaults__
    return functools.update_wrapper(twin, value)


def _holds_method(value: Any, layer: nn.Module) -> bool:
    if isinstance(value, MethodType):
        return value.__self__ is layer
    if isinstance(value, functools.partial):
        return any(_holds_method(one, layer) for one in (value.func, *value.args, *value.keywords.values()))
    cells = (value.__closure__ or ()) if isinstance(value, FunctionType) else ()
    return any(_holds_method(held, layer) for cell in cells for held in _contents(cell))


def _cell(cell: CellType, old: nn.Module, new: nn.Module) -> CellType:
    """Return the cell of another function that holds the same, or one that leads to `new`."""
    for held in _contents(cell):
        changed = rebound(held, old, new)
        if changed is not held:
            return CellType(changed)
    return cell


def _contents(cell: CellType) -> list[Any]:
    try:
        return [cell.cell_contents]
    except ValueError:  # not assigned yet
        return []


def _differ(before: Any, after: Any) -> bool:
    return any(one is not other for one, other in zip(before, after, strict=True))
