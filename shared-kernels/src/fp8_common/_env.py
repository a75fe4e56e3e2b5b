"""The environment variable of the fp8 packages. No other file reads the environment.

| variable | values | meaning |
|---|---|---|
| `FP8_COMMON_BACKEND` | `auto` (default), `triton`, `reference` | which implementation casts on a GPU |
"""

import os
import typing
from collections.abc import Mapping
from functools import cache
from typing import Literal, TypeVar

from fp8_common.errors import Fp8Error

_Choice = TypeVar("_Choice", bound=str)

BACKEND_VARIABLE = "FP8_COMMON_BACKEND"

Backend = Literal["auto", "triton", "reference"]
BACKENDS: tuple[Backend, ...] = typing.get_args(Backend)


def backend(environ: Mapping[str, str] | None = None) -> Backend:
    """Return the implementation that the user asked for; "auto" if the variable is unset or empty.

    Args:
        environ: The environment to read; None reads the process's own, at every call.

    Raises:
        Fp8Error: The variable holds anything but one of `BACKENDS`.
    """
    # Asked by every cast: one look-up, and what it found was checked the first time.
    value = (os.environ if environ is None else environ).get(BACKEND_VARIABLE, "")
    return _choice(BACKEND_VARIABLE, BACKENDS, value)


@cache
def _choice(variable: str, choices: tuple[_Choice, ...], value: str) -> _Choice:
    # An empty variable counts as unset, so that `NAME= command` overrides one that is exported.
    value = value or "auto"
    for known in choices:  # and not `in`, so that type checkers see one of the choices returned
        if value == known:
            return known
    raise Fp8Error(f"{variable} must be one of {', '.join(choices)}, got {value!r}. Unset it for auto.")
