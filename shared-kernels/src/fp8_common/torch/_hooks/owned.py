"""`OwnedHook`: a hook that torch offers for the whole process alone, registered on behalf of one object.

torch walks over its dictionary of such hooks while it calls them. Taking one out from inside, or from a garbage
collection that happens to run at that moment, would raise in the middle of somebody's forward or step. So a hook whose
owner is gone only falls silent; the next registration or removal takes the silent ones out of the dictionary.
"""

import weakref
from collections.abc import Callable
from typing import Any

from fp8_common.torch._compat import disable_compiler


class OwnedHook:
    """Calls `react(owner, *arguments)` as long as its owner lives and `close` was not called.

    Args:
        register: One of torch's functions that register a hook for the process.
        owner: The object that needs it; not kept alive.
        react: What to call; its result is the hook's.
        at_once: Take it out when the owner dies: torch walks over a copy of the hooks of this kind.
        **options: Of `register`.
    """

    def __init__(
        self,
        register: Callable[..., Any],
        owner: object,
        react: Callable[..., Any],
        *,
        at_once: bool = False,
        **options: Any,
    ) -> None:
        self._owner: Callable[[], object | None] = weakref.ref(owner)
        if at_once:
            # `atexit` is a property, for which the stub leaves no slot
            # Not at the end of the process, where torch may be gone already.
            weakref.finalize(owner, self._remove_silent).atexit = False  # pyrefly: ignore[missing-attribute]
        self._react = react
        self._handle = register(self, **options)
        self._remove_silent()

    # Hooks of the process see Python objects that live outside of compiled code.
    @disable_compiler
    def __call__(self, *arguments: Any) -> Any:
        """React, if the owner is still there."""
        owner = self._owner()
        return None if owner is None else self._react(owner, *arguments)

    @property
    def is_silent(self) -> bool:
        """Whether it will never react again."""
        return self._owner() is None

    def close(self) -> None:
        """React to nothing from now on; may be called again."""
        self._owner = _nobody

    def remove(self) -> None:
        """Close it and take it out. To be called where torch cannot be walking over the hooks of this kind."""
        self.close()
        self._remove_silent()

    def _remove_silent(self) -> None:
        hooks = self._handle.hooks_dict_ref() or {}
        # A copy, because `remove` changes the dictionary.
        for hook in list(hooks.values()):
            if isinstance(hook, OwnedHook) and hook.is_silent:
                hook._handle.remove()


def _nobody() -> None:
    return None
