"""Checks of derivatives: warnings at the user's line, errors if unsupported."""

import inspect
import warnings
from types import FrameType
from typing import Any, NoReturn

from fp8_common import Fp8UnsupportedError

REVERSE_MODE_ONLY = (
    "An FP8 matmul has only reverse-mode derivatives, and jax.jvp, jax.jacfwd or jax.linearize was called. "
    "Use jax.vjp, jax.grad or jax.jacrev, or compute forward-mode derivatives with the layers in bfloat16."
)
LIBRARIES = ("jax", "flax", "equinox", "keras", "fp8_jax_owg", "contextlib", "functools")
"""Packages whose lines no warning points to."""
TRANSFORMS = ("vjp", "linearize")
"""Functions of `jax._src.api` that run forward rules; all other reverse-mode transforms call `vjp`."""


def check_derivative(warning: str = "", category: type[Warning] = UserWarning) -> None:
    """Find the transform that takes the derivative, warn, or raise.

    Call it in a forward rule.

    Args:
        warning: Text of the warning at the line that takes the derivative, once for each call of JAX; empty for none.
        category: Class of the warning.

    Raises:
        Fp8UnsupportedError: If the transform is `jax.linearize`, whose result could not be called.
    """
    here = transform = inspect.currentframe()
    while transform is not None and not _takes_a_derivative(transform):
        transform = transform.f_back
    if transform is not None and transform.f_code.co_name == "linearize":
        raise Fp8UnsupportedError(REVERSE_MODE_ONLY)
    user = transform or here
    while user is not None and user.f_back is not None and _package(user) in LIBRARIES:
        user = user.f_back
    if not warning or user is None:
        return
    if transform is not None:
        # A key added to the variables of a frame exists as long as the call runs. Python's own record of warnings is no
        # alternative: JAX changes the filters while it traces, which clears it.
        issued = transform.f_locals.setdefault("warnings of fp8_jax_owg", set())
        if warning in issued:
            return
        issued.add(warning)
    registry = user.f_globals.setdefault("__warningregistry__", {})
    warnings.warn_explicit(warning, category, user.f_code.co_filename, user.f_lineno, _module(user), registry)


def refuse_second_order(primals: Any, tangents: Any) -> NoReturn:
    """Raise for a second derivative; the JVP rule of `first_order_only`.

    Raises:
        Fp8UnsupportedError: In any case.
    """
    raise Fp8UnsupportedError(
        "An FP8 matmul has only first derivatives, and JAX requested a gradient of its gradient. "
        "Compute Hessians and other second derivatives with the layers in bfloat16 or float32."
    )


def _takes_a_derivative(frame: FrameType) -> bool:
    return frame.f_code.co_name in TRANSFORMS and _module(frame) == "jax._src.api"


def _package(frame: FrameType) -> str:
    return _module(frame).partition(".")[0]


def _module(frame: FrameType) -> str:
    return frame.f_globals.get("__name__", "")
