"""`OwgBox`: the box around a parameter that is overwritten with its gradient, as flax boxes sharded ones."""

from collections.abc import Callable
from typing import Any

import jax
from flax import struct
from flax.core import meta


class OwgBox(struct.PyTreeNode, meta.AxisMetadata[Any]):
    """Marks a parameter that is overwritten with its gradient.

    For models that keep all variables in "params", as praxis does; `self.param(name, owg_init(init), ...)` makes one.

    Attributes:
        value: The parameter.
    """

    value: Any

    is_overwrite_with_gradient = True

    def unbox(self) -> Any:
        """Return the parameter."""
        return self.value

    def replace_boxed(self, val: Any) -> "OwgBox":
        """Return a box around another value."""
        return OwgBox(val)

    def add_axis(self, index: int, params: dict[Any, Any]) -> "OwgBox":
        """Return the same box: it names no axes."""
        return self

    def remove_axis(self, index: int, params: dict[Any, Any]) -> "OwgBox":
        """Return the same box: it names no axes."""
        return self


def owg_init(init: Callable[..., jax.Array]) -> Callable[..., OwgBox]:
    """Return an initializer whose parameter is overwritten with its gradient.

    Args:
        init: Any initializer; its result must be float32.
    """
    return lambda *args, **kwargs: OwgBox(init(*args, **kwargs))
