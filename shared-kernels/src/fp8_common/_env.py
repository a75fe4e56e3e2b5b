"""Environment variable of the packages; no other module reads the environment.

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
        environ: Environment to read. None reads that of the process, at every call.

    Raises:
        Fp8Error: If the variable holds a value that is not in `BACKENDS`.
    """
    # An empty variable counts as unset, so that `NAME= command` overrides one that is exported.
    value = (os.environ if environ is None else environ).get(BACKEND_VARIABLE) or "auto"
    for known in BACKENDS:  # a loop instead of `in`, so that type checkers infer the Literal
        if value == known:
            return known
    raise Fp8Error(f"{BACKEND_VARIABLE} must be one of {', '.join(BACKENDS)}, got {value!r}. Unset it for auto.")
