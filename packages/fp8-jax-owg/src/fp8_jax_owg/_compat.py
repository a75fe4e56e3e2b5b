"""The private APIs of JAX that are used. No other file of this package imports `jax._src`.

JAX documents neither how to define an extended dtype nor how eager gradients of one are added. Where something
here is missing, `PROBLEM` says what, importing still works, and `fp8_jax_owg._mode` chooses the public way.
"""

from collections.abc import Callable
from typing import Any

import jax

PROBLEM: str | None = None
"""What this JAX lacks; None if everything was found."""

try:
    from jax._src import ad_util, core, dtypes, earray
    from jax._src.interpreters import pxla

    ExtendedDType: type = dtypes.ExtendedDType
    # Looked up here, and not where they are used, so that a name that is gone shows when this module is imported.
    _REQUIRED = (ad_util.raw_jaxval_adders, core.physical_aval, earray.EArray, pxla.global_result_handlers)
except (ImportError, AttributeError) as error:
    PROBLEM = f"jax {jax.__version__} has moved a private name: {error}"
    # `_dtype` derives a class from it when it is imported, and importing must work.
    ExtendedDType = object


def scalar_aval(dtype: Any) -> Any:
    """Return the abstract value of a scalar, as rules of extended dtypes must."""
    return core.ShapedArray((), dtype)


def result_handler(aval: Any, sharding: Any, committed: bool) -> Callable[[Any], Any]:
    """Return what wraps buffers of an extended dtype into an array; the layout is that of the physical dtype.

    Args:
        aval: Abstract value of the result.
        sharding: Its sharding, which the physical array shares.
        committed: Whether the array is pinned to its devices.
    """
    physical = core.physical_aval(aval)
    handler = pxla.global_result_handlers[core.ShapedArray](physical, sharding, committed)
    # What pxla makes has changed: an object whose results are wrapped by a function, in older versions a plain
    # function.
    if hasattr(handler, "wrap"):
        return handler.wrap(lambda array: earray.EArray(aval, array))
    return lambda buffers: earray.EArray(aval, handler(buffers))


def enable_eager_addition() -> None:
    """Let eager code accumulate cotangents of extended dtypes: by the rule of their dtype, as compiled code does."""

    def add(x: Any, y: Any) -> Any:
        dtype = x.dtype
        # compiled, because eager operations on extended arrays are few
        return jax.jit(lambda a, b: dtype._rules.add(dtype, a, b))(x, y)

    # One entry for all extended dtypes. Whoever registered one before keeps it: each looks the rule up in the dtype.
    ad_util.raw_jaxval_adders.setdefault(earray.EArray, add)


def blames_dtype(error: Exception) -> bool:
    """Return whether JAX failed because an operation, or its transpose, does not take arrays of the extended dtype."""
    text = str(error)
    # the names that errors about such arrays hold; of one that JAX has not written, there is no text at all
    return "fp32_max_grad" in text or "UndefinedPrimal" in text or (isinstance(error, NotImplementedError) and not text)


def name_of_rule(equation: Any) -> str:
    """Return the name of the function that a `custom_vjp_call` in a traced program calls."""
    # With or without its constants around it, depending on the version of JAX.
    program = equation.params["call_jaxpr"]
    return str(getattr(program, "jaxpr", program).debug_info.func_name)


def is_mapped(x: Any) -> bool:
    """Return whether `vmap` maps a value of the function that it runs."""
    # only its own traced values have this attribute
    return getattr(x, "batch_dim", None) is not None


def mapped_axes(equation: Any) -> Any:
    """Return the mesh axes along which a `shard_map` in a traced program maps its body."""
    params = equation.params
    return params["newly_manual_axes"] if "newly_manual_axes" in params else params["manual_axes"]
