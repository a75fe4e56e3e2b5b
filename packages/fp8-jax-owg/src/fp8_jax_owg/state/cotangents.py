"""Observations as cotangents: encoding, combination by MAX, and their dtype.

Inside of a loss state has an extended dtype of JAX, whose rule autodiff calls to add: cotangents are combined by MAX.

- `fp32_max_grad` is float32 for XLA, with -inf as the zero of its cotangents: overwritten values of the user.
- `fp8_state` is the live leaf of a pair: one element holds everything that a matmul reads, as int32 [7], so that the
  leaf keeps the shape [..., 1] of the scale that it replaces. JAX moves such arrays, and raises where a loss computes
  with them. The elements are int32 because a cast to float32 would be legal for a dtype that is float32.

Neither leaves a traced function: `fp8_jax_owg.state.share` makes them, `unshare` returns float32. JAX documents neither
how to define such a dtype nor how eager gradients of one are added, so this file uses private names of JAX. No other
file of this package does.

Outside of the dtype autodiff makes zeros wherever a parameter was not used: for a branch that was not taken, for a
layer that was skipped. An observed amax of zero must differ from that, and must survive `+ 0`. So of float32

| cotangent | means |
|---|---|
| 0.0 | autodiff's zero: not used, nothing observed |
| -inf | not observed, explicitly |
| NaN, +inf | not finite, hence not recorded |
| in (-2^-125, -2^-126] | an observed zero or subnormal: its bits plus the bits of 2^-126, with the sign set |
| anything else | itself |

The fourth row also keeps subnormals out of the float operations in which XLA flushes them. Values are scales and
amax, hence not negative. Everything here works on bits.
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
from fp8_common.jax.numerics import SIGN_MASK, flipped, float_key, from_bits, to_bits, varying_axes
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
    "The loss computes with FP8 state, which has no gradient: its gradient is what layers observe. Apply noise, "
    "clipping, casts, norms and penalties to parameters alone: to fp8_jax_owg.tree.split(variables)[0], to leaves "
    "whose dtype is floating (jnp.issubdtype(x.dtype, jnp.floating)), or with fp8_jax_owg.tree.cast_params. Select the "
    'state of a layer by state[i] or jnp.take(..., mode="clip"), and log it with fp8_jax_owg.state.read. Pass it '
    "into a shard_map(check_vma=False) or a pmap as fp8_jax_owg.state.unshare(state), and call "
    "fp8_jax_owg.state.replicated there."
)
FLOAT32 = np.dtype("float32")
NOT_OBSERVED = np.float32(-np.inf)
NOT_OBSERVED_BITS = int(NOT_OBSERVED.view(np.int32))
INFINITY_KEY, SMALLEST_NORMAL_KEY = np.int32(0x7F800000), np.int32(0x00800000)


# Primitives from here on, where `jnp` would trace a function for each operator: each matmul of a program traces these.
def encode(value: jax.Array) -> jax.Array:
    """Return observations as cotangents.

    Args:
        value: float32, any shape: not negative, or -inf for "not observed".
    """
    bits = to_bits(value)
    # negative values are large without a sign
    is_small = lax.lt(lax.bitcast_convert_type(bits, np.uint32), np.uint32(SMALLEST_NORMAL_KEY))
    # Exponent field 1 instead of 0 with the mantissa unchanged: a normal number, which nothing flushes. Negative,
    # unlike scales and amax, so that `decode` recognizes it.
    raise_by = lax.mul(lax.convert_element_type(is_small, np.int32), np.int32(SIGN_MASK + SMALLEST_NORMAL_KEY))
    return from_bits(lax.add(bits, raise_by))


def decode(cotangent: jax.Array) -> jax.Array:
    """Return cotangents as observations: float32, finite, or -inf for "not observed"."""
    bits, key = to_bits(cotangent), float_key(cotangent)
    # Negative, in the lowest binade: `encode` put zeros and subnormals there, and nothing else is negative but -inf.
    lowest = lax.bitwise_and(lax.ge(key, SMALLEST_NORMAL_KEY), lax.lt(key, np.int32(2 * SMALLEST_NORMAL_KEY)))
    is_small = lax.bitwise_and(lax.lt(bits, np.int32(0)), lowest)
    observed = lax.select(is_small, from_bits(lax.sub(key, SMALLEST_NORMAL_KEY)), cotangent)
    # `key` has no sign: -0, -inf and every NaN are among these, too.
    nothing = lax.bitwise_or(lax.eq(key, np.int32(0)), lax.ge(key, INFINITY_KEY))
    return observed_where(lax.bitwise_not(nothing), observed)


def observed_where(flags: jax.Array, value: jax.Array) -> jax.Array:
    """Return `value` where the flags of its shape are true, else `NOT_OBSERVED`."""
    # as integers, among which `jax_debug_infs` stops at no constant
    bits = to_bits(value)
    return from_bits(lax.select(flags, bits, lax.full_like(bits, NOT_OBSERVED_BITS)))


def is_observed(value: jax.Array) -> jax.Array:
    """Return bool: where decoded observations exist."""
    return lax.ne(to_bits(value), np.int32(NOT_OBSERVED_BITS))


def maximum(x: jax.Array, y: jax.Array) -> jax.Array:
    """Return the greater observation, also among subnormals.

    XLA's float maximum flushes subnormals to zero.
    """
    return from_ordered(lax.max(to_ordered(x), to_ordered(y)))


def combine_max(x: jax.Array, y: jax.Array) -> jax.Array:
    """Return the elementwise maximum of cotangents; 0 if neither observed anything."""
    return zero_where_nothing(encode(maximum(decode(x), decode(y))))


def zero_where_nothing(cotangent: jax.Array) -> jax.Array:
    """Return cotangents with "not observed" as 0, for finite norms."""
    return jnp.where(is_observed(decode(cotangent)), cotangent, jnp.float32(0))


def maximum_over(x: jax.Array, axis: int) -> jax.Array:
    """Return the greatest observation along an axis, which must not be empty."""
    return from_ordered(jnp.max(to_ordered(x), axis=axis))


def to_ordered(x: jax.Array) -> jax.Array:
    """Return int32 in the order of float32 `x`, for MAX collectives."""
    return flipped(to_bits(x))


def from_ordered(keys: jax.Array) -> jax.Array:
    """Undo `to_ordered`."""
    return from_bits(flipped(keys))


# ---------------------------------------------------------------- the dtype


# JAX recognizes a dtype with custom rules by `issubdtype(dtype, jax.dtypes.extended)`, which reads the dtype's
# attribute `type`: this class, which has no instances.
class max_grad(jax.dtypes.extended):
    """The scalar type, for `jax.dtypes.issubdtype`."""


class MaxGradRules:
    """JAX's rules for the extended dtype."""

    # to and from the representation of an element in XLA, and nothing else
    allow_conversion = True

    @staticmethod
    def physical_element_aval(dtype: Any) -> Any:
        """Representation of one element in XLA."""
        return core.ShapedArray(dtype.element, dtype.representation)

    @staticmethod
    def tangent_dtype(dtype: Any) -> Any:
        """Dtype of tangents and cotangents: unchanged, so that MAX combines them."""
        return dtype

    @staticmethod
    def add(dtype: Any, x: Any, y: Any) -> Any:
        """Combination of two cotangents in autodiff."""
        # Called for `add_any`, the primitive by which autodiff joins the cotangents of several uses, iterations of a
        # loop among them. They are decoded here (`share_leaf`): encoded, a zero would be above every subnormal.
        return from_values(maximum(values_of(x), values_of(y)), dtype)

    @staticmethod
    def zero(dtype: Any) -> Any:
        """The cotangent of unused state, and the least of all."""
        return MaxGradRules.full((), 0, dtype)

    @staticmethod
    def full(shape: tuple[int, ...], value: Any, dtype: Any) -> Any:
        """An array of one value; of zeros, one of "not used"."""
        # JAX requests zeros where it fills up a cotangent, around a slice for example.
        is_zero = isinstance(value, int | float | np.number) and value == 0
        if not dtype.element:
            filled = lax.full(shape, NOT_OBSERVED if is_zero else lax.convert_element_type(value, np.float32))
            return lax.convert_element_type(filled, dtype)
        if not is_zero:
            raise Fp8Error(COMPUTES_WITH_STATE)
        # All bits set sort below -inf, so as a cotangent nothing is observed. As a value, which a loss may have made by
        # `zeros_like`, it is NaN, and so are the results of a matmul that reads it.
        return lax.convert_element_type(lax.full((*shape, *dtype.element), -1, np.int32), dtype)

    @staticmethod
    def global_sharded_result_handler(aval: Any, sharding: Any, committed: bool) -> Callable[[Any], Any]:
        """Conversion of compiled results to arrays."""
        # Needed although the dtype stays inside of traced functions: outside of jit each primitive is a separate
        # compiled function, and returns arrays of this dtype. The layout is the representation's.
        physical, placed = core.physical_aval(aval), sharding_impls.physical_sharding(aval, sharding)
        handler = pxla.global_result_handlers[core.ShapedArray](physical, placed, committed)
        return handler.wrap(lambda array: earray.EArray(aval, array))


@dataclasses.dataclass(frozen=True, eq=False)
class MaxGradDType(dtypes.ExtendedDType):
    """The dtype object; its instances are `fp32_max_grad` and `fp8_state`.

    Both equal the dtypes of flax and praxis (`fm32`), which combine cotangents by MAX as well: their layers compare
    dtypes to recognize shared state, and ours accept state shared by their loops. They do not equal each other.

    Attributes:
        name: Name in JAX's errors: a word, and a remedy.
        representation: The dtype of an element for XLA. No cast of floats reaches an element of int32.
        element: The shape of one element for XLA.
        itemsize: Bytes of one element.
        float_dtype: The name by which the dtypes of flax and praxis are found.
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
        # no other extended dtype wraps a float dtype. From the other side too: the `__eq__` of flax's dataclass returns
        # NotImplemented for another class, and Python then calls this one.
        same = hasattr(other, "_rules") and getattr(other, "float_dtype", None) == self.float_dtype
        return same and getattr(other, "element", self.element) == self.element

    # Not the hash of flax's dtype: sets and dictionaries keep both, only `==` does not.
    __hash__ = object.__hash__

    def __repr__(self) -> str:
        return self.name.partition(" ")[0]

    def __reduce__(self) -> str:
        # a copy is the same object
        return repr(self)


fp32_max_grad = MaxGradDType("fp32_max_grad", jnp.dtype("float32"), (), 4)
"""float32 whose cotangents are combined by MAX; "not used" is -inf."""
fm32 = fp32_max_grad
"""The short name that flax and praxis use."""
# JAX sums the results of devices while it compiles, after the last call of this package.
_NAME = (
    "fp8_state (into a shard_map with check_vma=False or a pmap pass fp8_jax_owg.state.unshare(state), and call "
    "fp8_jax_owg.state.replicated there)"
)
fp8_state = MaxGradDType(_NAME, jnp.dtype("int32"), (7,), 28)
"""Live leaves, see `fp8_jax_owg.state.in_loss`."""


def values_of(x: jax.Array) -> jax.Array:
    """Return a shared array [...] as float32 [..., *element]; no derivative."""
    dtype: Any = x.dtype
    if getattr(dtype, "element", ()):
        return from_bits(lax.convert_element_type(x, np.int32))
    return lax.convert_element_type(x, np.float32)


def from_values(values: jax.Array, dtype: Any) -> jax.Array:
    """Undo `values_of`."""
    return lax.convert_element_type(to_bits(values) if getattr(dtype, "element", ()) else values, dtype)


def _add_eagerly(x: Any, y: Any) -> Any:
    dtype = x.dtype
    # compiled, because eager operations on extended arrays are few
    return jax.jit(lambda a, b: dtype._rules.add(dtype, a, b))(x, y)


# Eager code accumulates cotangents of extended dtypes by the rule of their dtype, as compiled code does. One entry for
# all extended dtypes: an earlier registration is kept, each looks the rule up in the dtype.
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
    """Return a float32 array as a shared dtype.

    [..., 7] becomes [..., 1] of `fp8_state`; a shared array is returned unchanged.

    Raises:
        Fp8Error: It is neither.
    """
    return x if is_shared(x) else _share(dtype, check_float32(x))


def unshare_leaf(x: Any) -> jax.Array:
    """Undo `share_leaf`; float32 stays.

    Raises:
        Fp8Error: It is neither.
    """
    return _unshare(x.dtype, x) if is_shared(x) else check_float32(x)


def from_numbers(numbers: jax.Array, dtype: Any = fp8_state) -> jax.Array:
    """Return live leaves' numbers [..., 7] as [..., 1] of `fp8_state`.

    No derivative.
    """
    if getattr(dtype, "element", ()):
        numbers = lax.expand_dims(to_bits(numbers), (numbers.ndim - 1,))
    return lax.convert_element_type(numbers, dtype)


def numbers_of(x: jax.Array) -> jax.Array:
    """Undo `from_numbers`; float32 stays."""
    if getattr(x.dtype, "element", ()):
        return from_bits(lax.squeeze(lax.convert_element_type(x, np.int32), (x.ndim - 1,)))
    return lax.convert_element_type(x, np.float32)


# Custom rules, because here cotangents leave the dtype, and JAX adds from there on: encoded, a zero of autodiff means
# "not used", and adding it changes nothing. JAX's own transpose would treat encoded cotangents as values.
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
    """Return `x`, an array or a tree; differentiating through it raises.

    It stands in the forward and backward rules of matmuls. Those rules run without being differentiated, unless
    someone differentiates a gradient, and would then get zeros that look like a result.
    """
    return x


first_order_only.defjvp(refuse_second_order)


@contextlib.contextmanager
def reverse_mode_only() -> Iterator[None]:
    """Turn JAX's forward-mode error into a readable one.

    Raises:
        Fp8UnsupportedError: It did.
    """
    try:
        yield
    except TypeError as error:
        if "forward-mode" not in str(error):
            raise
        raise Fp8UnsupportedError(REVERSE_MODE_ONLY) from error


# ---------------------------------------------------------------- examples and devices


def like(observed: jax.Array, value: jax.Array) -> jax.Array:
    """Reduce observations to the state's shape, by MAX.

    Under `vmap` with a state that is shared by the examples, the maximum over the examples; with
    `shard_map(..., check_vma=True)` and a state that is equal on all devices of an axis, the maximum over them.

    Args:
        observed: float32 [...]: decoded observations.
        value: The state it is for; only how it is mapped matters.
    """
    # First over examples of vmap, which only a batching rule sees, then over devices, whose axes the types show.
    reduced = _over_mapped(observed, value)
    missing = tuple(sorted(varying_axes(reduced) - varying_axes(value)))
    return from_ordered(lax.pmax(to_ordered(reduced), missing)) if missing else reduced


@custom_vmap
def _over_mapped(observed: jax.Array, value: jax.Array) -> jax.Array:
    return observed


@_over_mapped.def_vmap
def _(size: int, batched: list[bool], observed: jax.Array, value: jax.Array) -> tuple[jax.Array, bool]:
    observed_differs, value_differs = batched
    # A state that all examples share has one next value: their maximum. JAX would add up.
    if observed_differs and not value_differs:
        # `custom_vmap` puts the examples first. Called again for a `vmap` around this one.
        return _over_mapped(maximum_over(observed, 0), value), False
    return _over_mapped(observed, value), observed_differs
