"""`watch_reads`: whether a function calls `fp8_jax_owg.read` while it runs, of which a loss is then checked.

What layers read they use once. What other code reads it may use several times, which JAX adds up in silence.
"""

import contextlib
import threading
from collections.abc import Iterator

_watching = threading.local()


@contextlib.contextmanager
def watch_reads() -> Iterator[list[bool]]:
    """Return a list that holds something after the `with` block if this thread called `read` in it."""
    outer = getattr(_watching, "found", None)
    found: list[bool] = []
    _watching.found = found
    try:
        yield found
    finally:
        _watching.found = outer
        # an outer loss contains the inner one
        if outer is not None:
            outer.extend(found)


def note_read() -> None:
    """Tell the innermost `watch_reads` of this thread."""
    found = getattr(_watching, "found", None)
    if found is not None:
        found.append(True)
