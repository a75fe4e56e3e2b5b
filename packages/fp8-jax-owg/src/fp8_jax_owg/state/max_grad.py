"""The dtype `fp32_max_grad`: float32 whose cotangents are combined by MAX, with -inf as their zero.

It is an extended dtype of JAX: for XLA it is float32, autodiff asks it how to add. It never leaves a traced
function: `fp8_jax_owg.share` makes it and `read` turns it back.

JAX documents neither how to define an extended dtype nor how eager gradients of one are added, so this file uses
private names of JAX. No other file of this package does.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fp8_common import Fp8Error
from fp8_jax_owg.state import cotangents

try:
    from jax._src import ad_util, core, dtypes, earray
    from jax._src.interpreters import pxla
except ImportError as error:
    raise ImportError(
        f"fp8_jax_owg cannot define its dtype in jax {jax.__version__}, which has moved a private name: {error}. "
        "Install a version that is tested, from 0.10 on."
    ) from error


# JAX finds out that a dtype has rules of its own with `issubdtype(dtype, jax.dtypes.extended)`, which looks at the
# dtype's attribute `type`: this class, of which there are no instances.
class max_grad(jax.dtypes.extended):
    """The scalar type, for `jax.dtypes.issubdtype`."""


class MaxGradRules:
    """What JAX asks about the dtype."""

    # JAX asks `convert_from` and `convert_to` first, for backward compatibility as its source says, and this attribute
    # where a dtype has neither.
    allow_conversion = True

    @staticmethod
    def convert_from(dtype: Any, other: Any) -> bool:
        """Whether `dtype` converts to the plain dtype `other`."""
        return dtype.float_dtype == other

    @staticmethod
    def convert_to(other: Any, dtype: Any) -> bool:
        """Whether the plain dtype `other` converts to `dtype`."""
        return dtype.float_dtype == other

    @staticmethod
    def physical_element_aval(dtype: Any) -> Any:
        """What one element is for XLA."""
        return core.ShapedArray((), dtype.float_dtype)

    @staticmethod
    def tangent_dtype(dtype: Any) -> Any:
        """The dtype of tangents and cotangents: the same, so that they meet by MAX."""
        return dtype

    @staticmethod
    def add(dtype: Any, x: Any, y: Any) -> Any:
        """How autodiff combines two cotangents."""
        # The conversion is free: for XLA both dtypes are float32.
        # Called for `add_any`, the primitive by which autodiff joins the cotangents of several uses, iterations of a
        # loop among them. They are decoded here (`share_leaf`): encoded, a zero would be above every
        # subnormal.
        plain = (lax.convert_element_type(one, dtype.float_dtype) for one in (x, y))
        return lax.convert_element_type(cotangents.maximum(*plain), dtype)

    @staticmethod
    def zero(dtype: Any) -> Any:
        """The cotangent of what was not used: -inf."""
        return lax.convert_element_type(cotangents.NOT_OBSERVED, dtype)

    @staticmethod
    def full(shape: tuple[int, ...], value: Any, dtype: Any) -> Any:
        """An array of one value; of zeros, one of "not used"."""
        # JAX asks for zeros where it fills up a cotangent, around a slice that was used for example. As values of a
        # state both mean the same: nothing was observed.
        if isinstance(value, int | float | np.number) and value == 0:
            value = cotangents.NOT_OBSERVED
        plain = lax.full(shape, lax.convert_element_type(value, dtype.float_dtype), dtype.float_dtype)
        return lax.convert_element_type(plain, dtype)

    @staticmethod
    def global_sharded_result_handler(aval: Any, sharding: Any, committed: bool) -> Callable[[Any], Any]:
        """How results of compiled functions become arrays."""
        # Needed although the dtype stays inside of traced functions: outside of jit each primitive is a compiled
        # function of its own, and returns arrays of this dtype. The layout is that of float32.
        physical = core.physical_aval(aval)
        handler = pxla.global_result_handlers[core.ShapedArray](physical, sharding, committed)
        # What pxla makes has changed: an object whose results are wrapped by a function, in older versions a plain
        # function.
        if hasattr(handler, "wrap"):
            return handler.wrap(lambda array: earray.EArray(aval, array))
        return lambda buffers: earray.EArray(aval, handler(buffers))


@dataclasses.dataclass(frozen=True, eq=False)
class MaxGradDType(dtypes.ExtendedDType):
    """The dtype object; `fp32_max_grad` is the only instance that is used.

    It equals the dtypes of flax and praxis (`fm32`), which combine cotangents by MAX as well: their layers compare
    dtypes to find out that a state is shared, and ours take what their loops have shared.
    """

    float_dtype: Any
    # JAX reads both under these names. `type` hides the builtin for the rest of the class body only.
    _rules: type = MaxGradRules
    type: type = max_grad

    def __eq__(self, other: object) -> bool:
        # no other extended dtype wraps a float dtype
        # From the other side too: the `__eq__` of flax's dataclass returns NotImplemented for another class, and Python
        # then asks this one.
        return hasattr(other, "_rules") and getattr(other, "float_dtype", None) == self.float_dtype

    def __hash__(self) -> int:
        # The hash of flax's dtype is another one: sets and dictionaries keep the two apart, only `==` does not.
        return hash((max_grad, "float32"))

    def __repr__(self) -> str:
        return "fp32_max_grad"

    name = property(__repr__)


fp32_max_grad = MaxGradDType(jnp.dtype("float32"))
"""float32 whose cotangents are combined by MAX; "not used" is -inf."""
fm32 = fp32_max_grad
"""The short name that flax and praxis use."""


def _add_eagerly(x: Any, y: Any) -> Any:
    dtype = x.dtype
    # compiled, because eager operations on extended arrays are few
    return jax.jit(lambda a, b: dtype._rules.add(dtype, a, b))(x, y)


# Eager code accumulates cotangents of extended dtypes by the rule of their dtype, as compiled code does. One entry for
# all extended dtypes: whoever registered one before keeps it, each looks the rule up in the dtype.
ad_util.raw_jaxval_adders.setdefault(earray.EArray, _add_eagerly)


def is_shared(x: Any) -> bool:
    """Whether `x` is an array of `fp32_max_grad`."""
    return getattr(x, "dtype", None) == fp32_max_grad


def mapped_axes(equation: Any) -> Any:
    """Return the mesh axes along which a `shard_map` in a traced program maps its body."""
    params = equation.params
    return params["newly_manual_axes"] if "newly_manual_axes" in params else params["manual_axes"]


# ---------------------------------------------------------------- into the dtype and back


def share_leaf(x: Any) -> jax.Array:
    """Return a float32 array as `fp32_max_grad`; a shared one as it is.

    Raises:
        Fp8Error: It is neither.
    """
    return x if is_shared(x) else _share(check_float32(x))


def as_float32(tree: Any) -> Any:
    """Return a tree with shared leaves read, each for a single use; others must be float32 and stay.

    Raises:
        Fp8Error: A leaf is neither float32 nor shared.
    """
    return jax.tree.map(lambda x: _read(x) if is_shared(x) else check_float32(x), tree)


def check_float32(x: Any) -> Any:
    """Return `x`, which must be float32.

    Raises:
        Fp8Error: It is not, with the reason and the remedy.
    """
    dtype = getattr(x, "dtype", None)
    if dtype != jnp.float32:
        raise Fp8Error(
            f"Overwrite-with-gradient values must be float32, got {dtype or type(x).__name__}. Scales and amax "
            "histories lose their meaning in another dtype: cast parameters with fp8_jax_owg.cast_params, which "
            "leaves them alone, or repair a checkpoint with fp8_jax_owg.checkpoint.upgrade."
        )
    return x


# A rule of its own, because here cotangents leave the dtype, and JAX adds from there on: encoded, a zero of autodiff
# means "not used", and adding it changes nothing.
@jax.custom_vjp
def _share(x: jax.Array) -> jax.Array:
    return lax.convert_element_type(x, fp32_max_grad)


_share.defvjp(lambda x: (_share(x), None), lambda _, g: (cotangents.encode(lax.convert_element_type(g, jnp.float32)),))


@jax.custom_vjp
def _read(x: jax.Array) -> jax.Array:
    return lax.convert_element_type(x, jnp.float32)


# JAX's own transpose of the conversion would take the encoded cotangent for a value
_read.defvjp(lambda x: (_read(x), None), lambda _, g: (lax.convert_element_type(cotangents.decode(g), fp32_max_grad),))
