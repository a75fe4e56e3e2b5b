"""The two modes in which cotangents of shared values are combined: "extended" (a dtype) and "fan_out" (slots).

The extended dtype needs no number of uses, but private APIs of JAX. So it is tried out once per process, on a loop
that sees 1, 5, 3, 2, eagerly and compiled; unless both give 5, everything falls back to public API. The choice is
made while a function is traced: compiled functions keep theirs.
"""

import contextlib
import functools
import logging
import threading
import typing
from collections.abc import Iterator
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fp8_common import Fp8Error, Fp8UnsupportedError
from fp8_common.plugin import owg_mode
from fp8_jax_owg import _compat as compat
from fp8_jax_owg._dtype import fp32_max_grad

_log = logging.getLogger(__name__)

Mode = Literal["extended", "fan_out"]
MODES: tuple[Mode, ...] = typing.get_args(Mode)

_override = threading.local()


def get_mode() -> Mode:
    """Return how values meet: what `use_mode` or `FP8_JAX_OWG_MODE` says, else "extended" if it works here.

    Raises:
        Fp8UnsupportedError: "extended" was asked for and does not work with this JAX.
    """
    # Read whenever something is traced: the environment may change, what is compiled stays.
    asked = getattr(_override, "mode", None) or owg_mode()
    if asked == "fan_out":
        return "fan_out"
    problem = find_problem()
    if problem is None:
        return "extended"
    if asked == "extended":
        raise Fp8UnsupportedError(f"Mode extended does not work here: {problem}. Use mode fan_out, or leave it unset.")
    return "fan_out"


@contextlib.contextmanager
def use_mode(mode: Mode) -> Iterator[None]:
    """Choose the mode for what this thread traces inside the `with` block.

    Args:
        mode: "extended" or "fan_out".

    Raises:
        Fp8Error: Another mode.
    """
    if mode not in MODES:
        raise Fp8Error(f"mode must be one of {', '.join(MODES)}, got {mode!r}.")
    before = getattr(_override, "mode", None)
    _override.mode = mode
    try:
        yield
    finally:
        _override.mode = before


@functools.cache
def find_problem() -> str | None:
    """Return why the extended dtype does not work with this JAX; None if it does. Tried once per process."""
    problem = compat.PROBLEM or _try_in_thread()
    if problem is not None:
        _log.warning("fp8_jax_owg falls back to mode fan_out: %s", problem)
    return problem


def _try_in_thread() -> str | None:
    """Run the trial in a thread of its own: whoever traces now, or has changed settings, must not touch it."""
    found: list[str | None] = []
    thread = threading.Thread(target=lambda: found.append(_try()), name="fp8-jax-owg-probe")
    thread.start()
    thread.join()
    return found[0] if found else "the trial died"


def _try() -> str | None:
    try:
        # Eager code and compiled code add cotangents in different places of JAX, see `_compat.enable_eager_addition`.
        for wrap in (lambda f: f, jax.jit):
            seen = float(np.asarray(wrap(jax.grad(_trial_loss))(jnp.float32(0))))
            if seen != 5:
                return f"a loop that sees 1, 5, 3, 2 gave {seen:g} instead of 5 with jax {jax.__version__}"
    except Exception as error:  # whatever a moved private API raises means the same: it cannot be used
        _log.debug("the trial of the extended dtype failed", exc_info=True)
        return f"{type(error).__name__} with jax {jax.__version__}: {str(error).splitlines()[0] if str(error) else ''}"
    return None


def _trial_loss(amax: jax.Array) -> jax.Array:
    # Closed over by the loop, so each iteration is a use. A SUM of 1, 5, 3, 2 is 11, the first is 1 and the last is 2:
    # only MAX gives 5.
    shared = _enter(amax)

    def body(carry: jax.Array, x: jax.Array) -> tuple[jax.Array, None]:
        return carry + _see(x, shared), None

    return lax.scan(body, jnp.float32(0), jnp.asarray([1, 5, 3, 2], jnp.float32))[0]


# Not `_sharing._share`: that module imports this one.
@jax.custom_vjp
def _enter(x: jax.Array) -> jax.Array:
    return lax.convert_element_type(x, fp32_max_grad)


_enter.defvjp(lambda x: (_enter(x), None), lambda _, g: (lax.convert_element_type(g, jnp.float32),))


@jax.custom_vjp
def _see(x: jax.Array, amax: jax.Array) -> jax.Array:
    return x


_see.defvjp(lambda x, amax: (x, x), lambda x, g: (g, lax.convert_element_type(x, fp32_max_grad)))
