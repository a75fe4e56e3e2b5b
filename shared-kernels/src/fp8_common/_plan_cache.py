"""`remembered`: launch plans that every step asks for are made once."""

from collections.abc import Callable
from functools import lru_cache
from typing import Any, TypeVar

KEPT = 1024
"""Plans of each kernel that are remembered: numbers of tokens may change from step to step."""

_Make = TypeVar("_Make", bound=Callable[..., Any])


def remembered(make: _Make) -> _Make:
    """Return a function that gives what `make` gave before for the same arguments, the `KEPT` latest ones."""
    kept: Any = lru_cache(maxsize=KEPT)(make)
    return kept
