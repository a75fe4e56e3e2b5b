"""Observations as cotangents: two extended dtypes of JAX that add by MAX.

Inside of a loss, state has an extended dtype: one that JAX treats as opaque and whose rules it calls. Autodiff adds
cotangents by such a rule, and the rule here returns their MAX.

- `fp32_max_grad` is float32 for XLA, with -inf as the zero of its cotangents. Overwritten values that are no pair have
  this dtype.
- `fp8_state` is the dtype of live leaves, which replace pairs. An element is int32 [7] for XLA and holds everything
  that a matmul reads of a pair, so a leaf keeps the shape [..., 1] of the scale that it replaces. JAX moves such
  arrays, and raises where a loss computes with them. They are int32 because JAX would permit a cast to float32 for a
  dtype that is float32 for XLA.

Arrays of these dtypes do not leave the loss: `fp8_jax_owg.state.share` creates them, and `unshare` returns float32.

JAX documents neither the definition of such a dtype nor the addition of its eager gradients, so this file uses private
names of JAX, and registers one function in JAX. No other file of this package does.

Outside of these dtypes autodiff creates zeros wherever a parameter was not used: in a branch that was not taken, in a
layer that was skipped. An observed amax of zero must differ from that, and must survive `+ 0`. So float32 cotangents
have these meanings:

| cotangent | means |
|---|---|
| 0.0 | autodiff's zero: not used, nothing observed |
| -inf | not observed, explicitly |
| NaN, +inf | not finite, hence not recorded |
| in (-2^-125, -2^-126] | an observed zero or subnormal: its bits plus the bits of 2^-126, with the sign set |
| anything else | itself |

Values are scales and amax, hence not negative. The encoding of the fourth row also protects subnormals from float
operations in which XLA flushes them. All functions here work on bits.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_batching import custom_vmap

from fp8_common import Fp8Error, Fp8UnsupportedError
from fp8_common.jax.numerics import (
    INF_KEY,
    MIN_NORMAL_KEY,
    SIGN_MASK,
    flipped,
    float_key,
    from_bits,
    to_bits,
    varying_axes,
)
from fp8_jax_owg.derivatives import REVERSE_MODE_ONLY, refuse_second_order
from fp8_jax_owg.state.pairs import check_float32

try:
    from jax._src import ad_util, core, dtypes, earray, sharding_impls
    from jax._src.interpreters import pxla
except ImportError as error:
    raise ImportError(
        f"fp8_jax_owg cannot define its dtype in jax {jax.__version__}, which has moved a private name: {error}. "
        "Install a version that is tested, from 0.10.1 on."
    ) from error


COMPUTES_WITH_STATE = (
    "The loss computes with FP8 state, whose gradient is reserved for the observations of layers. Apply noise, "
    "clipping, casts, norms and penalties to parameters alone: to fp8_jax_owg.tree.split(variables)[0], to leaves "
    "whose dtype is floating (jnp.issubdtype(x.dtype, jnp.floating)), or with fp8_jax_owg.tree.cast_params. Select the "
    'state of a layer by state[i] or jnp.take(..., mode="clip"), and log it with fp8_jax_owg.state.read. Pass it '
    "into a shard_map(check_vma=False) or a pmap as fp8_jax_owg.state.unshare(state), and call "
    "fp8_jax_owg.state.replicated there."
)
FLOAT32 = np.dtype("float32")
NOT_OBSERVED = np.float32(-np.inf)
NOT_OBSERVED_BITS = int(NOT_OBSERVED.view(np.int32))
INFINITY_KEY, SMALLEST_NORMAL_KEY = np.int32(INF_KEY), np.int32(MIN_NORMAL_KEY)


# The functions from here on use `lax`, because `jnp` would trace a function for each operator, and each matmul of a
# program traces these functions.
def encode(value: jax.Array) -> jax.Array:
    """Return observations as cotangents.

    Args:
        value: float32, any shape: not negative, or -inf for "not observed".

    Returns:
        float32 of the same shape. Zeros and subnormals are encoded as described in this module; others are unchanged.
    """
    bits = to_bits(value)
    # As unsigned numbers, the bits of negative values are large.
    is_small = lax.lt(lax.bitcast_convert_type(bits, np.uint32), np.uint32(SMALLEST_NORMAL_KEY))
    # Exponent field 1 instead of 0 with the mantissa unchanged: a normal number, which nothing flushes. Negative,
    # unlike scales and amax, so that `decode` recognizes it.
    raise_by = lax.mul(lax.convert_element_type(is_small, np.int32), np.int32(SIGN_MASK + SMALLEST_NORMAL_KEY))
    return from_bits(lax.add(bits, raise_by))


def decode(cotangent: jax.Array) -> jax.Array:
    """Return cotangents as observations: float32, finite, or -inf for "not observed"."""
    bits, key = to_bits(cotangent), float_key(cotangent)
    # Negative values in the lowest binade are zeros and subnormals that `encode` put there. The only other is -inf.
    lowest = lax.bitwise_and(lax.ge(key, SMALLEST_NORMAL_KEY), lax.lt(key, np.int32(2 * SMALLEST_NORMAL_KEY)))
    is_small = lax.bitwise_and(lax.lt(bits, np.int32(0)), lowest)
    observed = lax.select(is_small, from_bits(lax.sub(key, SMALLEST_NORMAL_KEY)), cotangent)
    # `key` has no sign, so this includes -0, -inf and every NaN.
    nothing = lax.bitwise_or(lax.eq(key, np.int32(0)), lax.ge(key, INFINITY_KEY))
    return observed_where(lax.bitwise_not(nothing), observed)


def observed_where(flags: jax.Array, value: jax.Array) -> jax.Array:
    """Return `value` where `flags`, of the same shape, are true, else -inf."""
    # As integers, because `jax_debug_infs` would stop at a float constant of -inf.
    bits = to_bits(value)
    return from_bits(lax.select(flags, bits, lax.full_like(bits, NOT_OBSERVED_BITS)))


def is_observed(value: jax.Array) -> jax.Array:
    """Return booleans: true where a decoded observation exists."""
    return lax.ne(to_bits(value), np.int32(NOT_OBSERVED_BITS))


def maximum(x: jax.Array, y: jax.Array) -> jax.Array:
    """Return the greater of two decoded observations.

    As integers, because XLA's float maximum may flush subnormals to zero.
    """
    return from_ordered(lax.max(to_ordered(x), to_ordered(y)))


def combine_max(x: jax.Array, y: jax.Array) -> jax.Array:
    """Return the elementwise maximum of cotangents; 0 if neither observed anything."""
    return zero_where_nothing(encode(maximum(decode(x), decode(y))))


def zero_where_nothing(cotangent: jax.Array) -> jax.Array:
    """Return cotangents with 0 for "not observed", so that norms are finite."""
    return jnp.where(is_observed(decode(cotangent)), cotangent, jnp.float32(0))


def maximum_over(x: jax.Array, axis: int) -> jax.Array:
    """Return the greatest decoded observation along an axis that is not empty."""
    return from_ordered(jnp.max(to_ordered(x), axis=axis))


def to_ordered(x: jax.Array) -> jax.Array:
    """Return int32 in the order of float32 `x`, for MAX collectives."""
    return flipped(to_bits(x))


def from_ordered(keys: jax.Array) -> jax.Array:
    """Undo `to_ordered`."""
    return from_bits(flipped(keys))


# ---------------------------------------------------------------- the dtype


# JAX recognizes a dtype with custom rules by `issubdtype(dtype, jax.dtypes.extended)`, which reads the dtype's
# attribute `type`. That is this class, which has no instances.
class max_grad(jax.dtypes.extended):
    """Scalar type of both dtypes, for `jax.dtypes.issubdtype`."""


class MaxGradRules:
    """Rules that JAX calls for arrays of both dtypes."""

    # Permits conversions to and from the representation of an element in XLA, and no others.
    allow_conversion = True

    @staticmethod
    def physical_element_aval(dtype: Any) -> Any:
        """Return shape and dtype of one element in XLA."""
        return core.ShapedArray(dtype.element, dtype.representation)

    @staticmethod
    def tangent_dtype(dtype: Any) -> Any:
        """Return the dtype of cotangents: the same, so that MAX combines them."""
        return dtype

    @staticmethod
    def add(dtype: Any, x: Any, y: Any) -> Any:
        """Return the MAX of two cotangents, which autodiff adds by this rule."""
        # Called for `add_any`, by which autodiff adds the cotangents of several uses, also in iterations of a loop.
        # In these dtypes cotangents are decoded: an encoded zero would be above every encoded subnormal.
        return from_values(maximum(values_of(x), values_of(y)), dtype)

    @staticmethod
    def zero(dtype: Any) -> Any:
        """Return the cotangent of unused state, the least of all."""
        return MaxGradRules.full((), 0, dtype)

    @staticmethod
    def full(shape: tuple[int, ...], value: Any, dtype: Any) -> Any:
        """Return an array of one value; zero stands for "not used"."""
        # JAX requests zeros to pad a cotangent, for example around a slice.
        is_zero = isinstance(value, int | float | np.number) and value == 0
        if not dtype.element:
            filled = lax.full(shape, NOT_OBSERVED if is_zero else lax.convert_element_type(value, np.float32))
            return lax.convert_element_type(filled, dtype)
        if not is_zero:
            raise Fp8Error(COMPUTES_WITH_STATE)
        # All bits set sort below -inf, so such a cotangent means "not observed". As values, which a loss may create by
        # `zeros_like`, they are NaN, and so are the results of a matmul that reads them.
        return lax.convert_element_type(lax.full((*shape, *dtype.element), -1, np.int32), dtype)

    @staticmethod
    def global_sharded_result_handler(aval: Any, sharding: Any, committed: bool) -> Callable[[Any], Any]:
        """Return a function that converts compiled results to arrays."""
        # Necessary even if the user never sees such an array: outside of jit each primitive is a separate compiled
        # function, whose results may have this dtype. Their layout is the layout of the representation.
        physical, placed = core.physical_aval(aval), sharding_impls.physical_sharding(aval, sharding)
        handler = pxla.global_result_handlers[core.ShapedArray](physical, placed, committed)
        return handler.wrap(lambda array: earray.EArray(aval, array))


@dataclasses.dataclass(frozen=True, eq=False)
class MaxGradDType(dtypes.ExtendedDType):
    """Extended dtype of JAX; the instances are `fp32_max_grad` and `fp8_state`.

    Both are equal to the dtypes of flax and praxis (`fm32`), which combine cotangents by MAX as well: layers of flax
    and praxis compare dtypes to recognize shared state, and layers of this package accept state that their loops have
    shared. `fp32_max_grad` and `fp8_state` are not equal to each other.

    Attributes:
        name: Name in JAX's errors: one word, for `fp8_state` followed by a remedy.
        representation: dtype of an element for XLA. Casts between floats do not apply to int32.
        element: Shape of one element for XLA.
        itemsize: Bytes of one element.
        float_dtype: Attribute that the dtypes of flax and praxis have, too, by which they are recognized.
    """

    name: str
    representation: Any
    element: tuple[int, ...]
    itemsize: int
    float_dtype: Any = FLOAT32
    # JAX reads both under these names. `type` hides the builtin for the rest of the class body only.
    _rules: type = MaxGradRules
    type: type = max_grad

    def __eq__(self, other: object) -> bool:
        # No other extended dtype has a float dtype. Comparisons that begin with flax's dtype work as well: the `__eq__`
        # of its dataclass returns NotImplemented for another class, and Python then calls this method.
        same = hasattr(other, "_rules") and getattr(other, "float_dtype", None) == self.float_dtype
        return same and getattr(other, "element", self.element) == self.element

    # The hash differs from the hash of flax's dtype: sets and dictionaries distinguish both, although they are equal.
    __hash__ = object.__hash__

    def __repr__(self) -> str:
        return self.name.partition(" ")[0]

    def __reduce__(self) -> str:
        # pickle and copy look up this name, so a copy is the same object.
        return repr(self)


fp32_max_grad = MaxGradDType("fp32_max_grad", jnp.dtype("float32"), (), 4)
"""dtype of float32 values whose cotangents are combined by MAX; "not used" is -inf."""
fm32 = fp32_max_grad
"""Short name of `fp32_max_grad` in flax and praxis."""
# JAX sums the results of devices while it compiles, after the last call of this package. Only the name of the dtype in
# its error can hold the remedy.
_NAME = (
    "fp8_state (into a shard_map with check_vma=False or a pmap pass fp8_jax_owg.state.unshare(state), and call "
    "fp8_jax_owg.state.replicated there)"
)
fp8_state = MaxGradDType(_NAME, jnp.dtype("int32"), (7,), 28)
"""dtype of live leaves, see `fp8_jax_owg.state.in_loss`."""


def values_of(x: jax.Array) -> jax.Array:
    """Return the elements of a shared array [...] as float32 [..., *element].

    It has no derivative.
    """
    dtype: Any = x.dtype
    if getattr(dtype, "element", ()):
        return from_bits(lax.convert_element_type(x, np.int32))
    return lax.convert_element_type(x, np.float32)


def from_values(values: jax.Array, dtype: Any) -> jax.Array:
    """Undo `values_of`."""
    return lax.convert_element_type(to_bits(values) if getattr(dtype, "element", ()) else values, dtype)


def _add_eagerly(x: Any, y: Any) -> Any:
    dtype = x.dtype
    # Compiled, because extended dtypes support few eager operations.
    return jax.jit(lambda a, b: dtype._rules.add(dtype, a, b))(x, y)


# With this function eager code adds cotangents of extended dtypes by the rule of their dtype, as compiled code does.
# JAX has one entry for all extended dtypes. An earlier registration is kept: it must look up the rule as well.
ad_util.raw_jaxval_adders.setdefault(earray.EArray, _add_eagerly)


def is_state(x: Any) -> bool:
    """Return whether `x` is an array of `fp8_state`."""
    dtype = getattr(x, "dtype", None)
    return isinstance(dtype, MaxGradDType) and dtype.element != ()


def is_shared(x: Any) -> bool:
    """Return whether `x` is an array of `fp8_state` or `fp32_max_grad`."""
    dtype = getattr(x, "dtype", None)
    return isinstance(dtype, dtypes.ExtendedDType) and dtype in (fp32_max_grad, fp8_state)


# ---------------------------------------------------------------- into the dtypes and back


def share_leaf(x: Any, dtype: Any = fp32_max_grad) -> jax.Array:
    """Return a float32 array as a shared dtype; a shared array unchanged.

    For `fp8_state`, [..., 7] becomes [..., 1]. The cotangent is encoded float32.

    Raises:
        Fp8Error: If `x` is neither float32 nor shared.
    """
    return x if is_shared(x) else _share(dtype, check_float32(x))


def unshare_leaf(x: Any) -> jax.Array:
    """Return a shared array as float32: undo `share_leaf`.

    A float32 array is returned unchanged.

    Raises:
        Fp8Error: If `x` is neither float32 nor shared.
    """
    return _unshare(x.dtype, x) if is_shared(x) else check_float32(x)


def from_numbers(numbers: jax.Array, dtype: Any = fp8_state) -> jax.Array:
    """Return float32 numbers as a shared dtype, without a derivative.

    For `fp8_state`, [..., 7] becomes [..., 1]. For `fp32_max_grad` the shape is unchanged.
    """
    if getattr(dtype, "element", ()):
        numbers = lax.expand_dims(to_bits(numbers), (numbers.ndim - 1,))
    return lax.convert_element_type(numbers, dtype)


def numbers_of(x: jax.Array) -> jax.Array:
    """Undo `from_numbers`; float32 is returned unchanged."""
    if getattr(x.dtype, "element", ()):
        return from_bits(lax.squeeze(lax.convert_element_type(x, np.int32), (x.ndim - 1,)))
    return lax.convert_element_type(x, np.float32)


# Custom rules, because cotangents leave the dtype here, and JAX adds floats from there on. Encoded, a zero of autodiff
# means "not used", and adding it changes nothing. JAX's transpose of a conversion would not encode and decode.
@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _share(dtype: Any, x: jax.Array) -> jax.Array:
    return from_numbers(x, dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _unshare(dtype: Any, x: jax.Array) -> jax.Array:
    return numbers_of(x)


_share.defvjp(lambda dtype, x: (from_numbers(x, dtype), None), lambda dtype, _, g: (encode(numbers_of(g)),))
_unshare.defvjp(lambda dtype, x: (numbers_of(x), None), lambda dtype, _, g: (from_numbers(decode(g), dtype),))


# ---------------------------------------------------------------- first derivatives only


@jax.custom_jvp
def first_order_only(x: Any) -> Any:
    """Return `x`, an array or a tree; raise if it is differentiated.

    Forward and backward rules of matmuls call it. These rules are differentiated only for the gradient of a gradient,
    which would otherwise be zeros that look like a result.

    Raises:
        Fp8UnsupportedError: If JAX differentiates through this function.
    """
    return x


first_order_only.defjvp(refuse_second_order)


@contextlib.contextmanager
def reverse_mode_only() -> Iterator[None]:
    """Replace JAX's error about forward-mode derivatives by a readable one.

    Raises:
        Fp8UnsupportedError: If the block raises that error.
    """
    try:
        yield
    except TypeError as error:
        if "forward-mode" not in str(error):
            raise
        raise Fp8UnsupportedError(REVERSE_MODE_ONLY) from error


# ---------------------------------------------------------------- examples and devices


def like(observed: jax.Array, value: jax.Array) -> jax.Array:
    """Reduce observations by MAX until they are mapped like their state.

    Under `vmap`, the result is the maximum over examples if they share the state. Under
    `shard_map(..., check_vma=True)`, it is the maximum over the devices of each axis along which the state is equal.

    Args:
        observed: float32, decoded observations.
        value: State that was observed. Only its mapping matters, not its values.
    """
    # First over examples of vmap, which only a batching rule sees, then over devices, whose axes are in the types.
    reduced = _over_mapped(observed, value)
    missing = tuple(sorted(varying_axes(reduced) - varying_axes(value)))
    return from_ordered(lax.pmax(to_ordered(reduced), missing)) if missing else reduced


@custom_vmap
def _over_mapped(observed: jax.Array, value: jax.Array) -> jax.Array:
    return observed


@_over_mapped.def_vmap
def _(size: int, batched: list[bool], observed: jax.Array, value: jax.Array) -> tuple[jax.Array, bool]:
    observed_differs, value_differs = batched
    # State that all examples share has one next value, their maximum. JAX would add the observations.
    if observed_differs and not value_differs:
        # `custom_vmap` puts examples on axis 0. Called again for an outer `vmap`.
        return _over_mapped(maximum_over(observed, 0), value), False
    return _over_mapped(observed, value), observed_differs
