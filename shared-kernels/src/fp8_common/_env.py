"""The environment variable of the packages; no other file reads the environment.

| variable | values | meaning |
|---|---|---|
| `FP8_COMMON_BACKEND` | `auto` (default), `triton`, `reference` | which implementation casts on a GPU |
"""

import os
import typing
from collections.abc import Mapping
from typing import Literal

from fp8_common.errors import Fp8Error

BACKEND_VARIABLE = "FP8_COMMON_BACKEND"

Backend = Literal["auto", "triton", "reference"]
BACKENDS: tuple[Backend, ...] = typing.get_args(Backend)


def backend(environ: Mapping[str, str] | None = None) -> Backend:
    """Return the requested implementation; "auto" if the variable is unset or empty.

    Args:
        environ: The environment to read; None reads the process's own, at every call.

    Raises:
        Fp8Error: The variable holds anything but one of `BACKENDS`.
    """
    # An empty variable counts as unset, so that `NAME= command` overrides one that is exported.
    value = (os.environ if environ is None else environ).get(BACKEND_VARIABLE) or "auto"
    for known in BACKENDS:  # and not `in`, so that type checkers see one of them returned
        if value == known:
            return known
    raise Fp8Error(f"{BACKEND_VARIABLE} must be one of {', '.join(BACKENDS)}, got {value!r}. Unset it for auto.")
