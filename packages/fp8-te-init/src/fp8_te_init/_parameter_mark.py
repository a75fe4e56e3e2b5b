"""The mark that says which kept values belong to a parameter object, and whose end tells that the object is gone.

`fully_shard`, `.to()` and assigned checkpoints put other objects in a parameter's place without telling anybody. A
weak reference to the tensor itself would tell, but tensors with weak references cannot be swapped
(`torch.utils.swap_tensors`). A small object that only the tensor refers to dies with it, and may be referred to.
"""

import weakref
from typing import Any

from fp8_te_init._kept_values import KeptValues

_MARK = "_fp8_init_mark"


class ParameterMark:
    """Names the kept values of the parameter that it is put on; copies and pickles of the parameter get an empty one.

    Args:
        kept: The kept values, not kept alive by it; None for an empty mark.
    """

    def __init__(self, kept: KeptValues | None = None) -> None:
        # Weakly: the module keeps the values alive, so that a parameter in somebody's list does not hold those of a
        # model that is gone.
        self.kept = (lambda: None) if kept is None else weakref.ref(kept)

    def __reduce__(self) -> tuple:
        """Pickle an empty mark: a loaded parameter has nothing kept."""
        return ParameterMark, ()

    def __deepcopy__(self, memo: dict) -> "ParameterMark":
        """Return an empty mark: a copied module marks its own parameters."""
        return ParameterMark()


def mark(parameter: Any, kept: KeptValues) -> ParameterMark:
    """Put a mark on a parameter and return it."""
    made = ParameterMark(kept)
    setattr(parameter, _MARK, made)
    return made


def is_marked(parameter: object) -> bool:
    """Return whether a parameter has a mark, an empty one too."""
    return getattr(parameter, _MARK, None) is not None


def kept_of(parameter: object) -> KeptValues | None:
    """Return what is kept for a parameter, by the mark that it carries."""
    found = getattr(parameter, _MARK, None)
    return None if found is None else found.kept()
