"""Observed amax and scales as float32 cotangents: how they are encoded, and how those of several uses meet.

Autodiff makes zeros wherever a parameter was not used: for a branch that was not taken, for a layer that was
skipped. An observed amax of zero must differ from that, and must survive `+ 0`. So

| cotangent | means |
|---|---|
| 0.0 | autodiff's zero: not used, nothing observed |
| -inf | not observed, said explicitly |
| NaN, +inf | not finite, hence not recorded |
| in (-2^-125, -2^-126] | an observed zero or subnormal: its bits plus those of 2^-126, with the sign set |
| anything else | itself |

The fourth row also keeps subnormals out of the float operations in which XLA flushes them. Values are scales and
amax, hence not negative. Everything here works on bits.

Matmuls have first derivatives only, and say so in one sentence: see `first_order_only`.
"""

import contextlib
from collections.abc import Iterator
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_batching import custom_vmap

from fp8_common import Fp8UnsupportedError
from fp8_common.jax.arrays import float_key, from_bits, to_bits
from fp8_common.jax.compat import varying_axes

NOT_OBSERVED = np.float32(-np.inf)
NOT_OBSERVED_BITS = int(NOT_OBSERVED.view(np.int32))
SIGN_BIT = -(2**31)
INFINITY_KEY = 0x7F800000
SMALLEST_NORMAL_KEY = 0x00800000


# Primitives from here on, where `jnp` would trace a function for each operator: each product of a program traces these.
def encode(value: jax.Array) -> jax.Array:
    """Return observations as cotangents.

    Args:
        value: float32, any shape: not negative, or -inf for "not observed".
    """
    bits = to_bits(value)
    # what is negative is large without a sign
    is_small = lax.lt(lax.bitcast_convert_type(bits, np.uint32), np.uint32(SMALLEST_NORMAL_KEY))
    # Exponent field 1 instead of 0 with the mantissa as it was: a normal number, which nothing flushes. Below zero,
    # where no scale and no amax lies, so that `decode` knows it.
    raise_by = lax.mul(lax.convert_element_type(is_small, np.int32), np.int32(SIGN_BIT + SMALLEST_NORMAL_KEY))
    return from_bits(lax.add(bits, raise_by))


def decode(cotangent: jax.Array) -> jax.Array:
    """Return cotangents as observations: float32, finite, or -inf for "not observed"."""
    bits, key = to_bits(cotangent), float_key(cotangent)
    # Negative, in the lowest binade: `encode` put zeros and subnormals there, and nothing else is negative but -inf.
    lowest = lax.bitwise_and(lax.ge(key, np.int32(SMALLEST_NORMAL_KEY)), lax.lt(key, np.int32(2 * SMALLEST_NORMAL_KEY)))
    is_small = lax.bitwise_and(lax.lt(bits, np.int32(0)), lowest)
    observed = lax.select(is_small, from_bits(lax.sub(key, np.int32(SMALLEST_NORMAL_KEY))), cotangent)
    # `key` has no sign: -0, -inf and every NaN are among these, too.
    nothing = lax.bitwise_or(lax.eq(key, np.int32(0)), lax.ge(key, np.int32(INFINITY_KEY)))
    return observed_where(lax.bitwise_not(nothing), observed)


def observed_where(flags: jax.Array, value: jax.Array) -> jax.Array:
    """Return `value` where the flags of its shape are true, else `NOT_OBSERVED`."""
    # as integers, among which `jax_debug_infs` stops at no constant
    bits = to_bits(value)
    return from_bits(lax.select(flags, bits, lax.full_like(bits, NOT_OBSERVED_BITS)))


def is_observed(value: jax.Array) -> jax.Array:
    """Return, for decoded observations, where there is one; bool."""
    return lax.ne(to_bits(value), np.int32(NOT_OBSERVED_BITS))


def maximum(x: jax.Array, y: jax.Array) -> jax.Array:
    """Return the greater observation, subnormals included, which XLA's float maximum takes for zero."""
    return from_ordered(lax.max(to_ordered(x), to_ordered(y)))


def meet(x: jax.Array, y: jax.Array) -> jax.Array:
    """Return the maximum of two cotangents, element by element; 0 where neither has observed anything."""
    return zero_where_nothing(encode(maximum(decode(x), decode(y))))


def zero_where_nothing(cotangent: jax.Array) -> jax.Array:
    """Return cotangents that say "not observed" by 0 alone: norms of them stay finite."""
    return jnp.where(is_observed(decode(cotangent)), cotangent, jnp.float32(0))


def maximum_over(x: jax.Array, axis: int) -> jax.Array:
    """Return the greatest observation along an axis, which must not be empty."""
    return from_ordered(jnp.max(to_ordered(x), axis=axis))


def to_ordered(x: jax.Array) -> jax.Array:
    """Return int32 that sort as the float32 `x` do; what collectives take the maximum of."""
    return _flipped(to_bits(x))


def from_ordered(keys: jax.Array) -> jax.Array:
    """Undo `to_ordered`."""
    return from_bits(_flipped(keys))


def _flipped(bits: jax.Array) -> jax.Array:
    # of negative floats the greater has the smaller bits
    return lax.select(lax.lt(bits, np.int32(0)), lax.bitwise_xor(bits, np.int32(0x7FFFFFFF)), bits)


# ---------------------------------------------------------------- first derivatives only


@jax.custom_jvp
def first_order_only(x: jax.Array) -> jax.Array:
    """Return `x`; differentiating through it raises.

    It stands in the forward and backward rules of matmuls. Those rules run without being differentiated, unless
    someone differentiates a gradient, and would then get zeros that look like a result.
    """
    return x


def refuse_second_order(primals: Any, tangents: Any, **params: Any) -> NoReturn:
    """Be the rule of forward derivatives of what runs in derivatives alone; `params` are those of a primitive.

    Raises:
        Fp8UnsupportedError: Always.
    """
    raise Fp8UnsupportedError(
        "An FP8 matmul has first derivatives only, and a gradient of its gradient was asked for. "
        "Compute Hessians and other second derivatives with the layers in bfloat16 or float32."
    )


first_order_only.defjvp(refuse_second_order)


@jax.custom_vjp
def _backward_only(x: jax.Array) -> jax.Array:
    return x


_backward_only.defvjp(lambda x: (x, None), lambda _, g: (g,))


@contextlib.contextmanager
def reverse_mode_only(operands: Any) -> Iterator[None]:
    """Say it in a sentence if JAX asks what is called here with a tree of arrays for a forward-mode derivative.

    Raises:
        Fp8UnsupportedError: It did.
    """
    try:
        yield
    except TypeError as error:
        # the same question about what can fail for no other reason
        try:
            jax.tree.map(_backward_only, operands)
        except TypeError:
            pass
        else:
            raise
        raise Fp8UnsupportedError(
            "An FP8 matmul has reverse-mode derivatives only, and jax.jvp, jax.jacfwd or jax.linearize was asked for. "
            "Use jax.vjp, jax.grad or jax.jacrev, or compute forward-mode derivatives with the layers in bfloat16."
        ) from error


# ---------------------------------------------------------------- examples and devices


def like(observed: jax.Array, value: jax.Array) -> jax.Array:
    """Reduce what was observed to what the state can hold, by MAX.

    Under `vmap` with a state that is shared by the examples, the maximum over the examples; with
    `shard_map(..., check_vma=True)` and a state that is equal on all devices of an axis, the maximum over them.

    Args:
        observed: float32 [...]: decoded observations.
        value: The state it is for; only how it is mapped matters.
    """
    # First over examples of vmap, which only a batching rule sees, then over devices, whose axes the types tell.
    reduced = _over_examples(observed, value)
    missing = tuple(sorted(varying_axes(reduced) - varying_axes(value)))
    return from_ordered(lax.pmax(to_ordered(reduced), missing)) if missing else reduced


@jax.custom_jvp
def _over_examples(observed: jax.Array, value: jax.Array) -> jax.Array:
    return _over_mapped(observed, value)


# JAX differentiates no `custom_vmap`, and says so without a word about the matmul
_over_examples.defjvp(refuse_second_order)


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


def adopt_mapping(state: list[Any], others: Any) -> list[Any]:
    """Return state that `vmap` maps wherever it maps one of the other arguments.

    `vmap(grad(loss))` of examples that start from one state asks for a next state of each. Without this the state is
    the same for all examples inside, as in `grad` of a `vmap`, where they share their next state.
    """
    # Only traced values can be mapped.
    traced = [leaf for leaf in jax.tree.leaves(others) if isinstance(leaf, jax.core.Tracer)]
    return _mapped_like(state, traced) if traced and state else state


@jax.custom_jvp
def _mapped_like(state: list[Any], others: list[Any]) -> list[Any]:
    return _mapped_as(state, others)


# as that of `_over_examples`: a gradient is differentiated here
_mapped_like.defjvp(refuse_second_order)


@custom_vmap
def _mapped_as(state: list[Any], others: list[Any]) -> list[Any]:
    return state


@_mapped_as.def_vmap
def _(size: int, batched: Any, state: list[Any], others: list[Any]) -> tuple[list[Any], list[bool]]:
    mapped = any(jax.tree.leaves(batched))
    each = [
        x if is_mapped or not mapped else jnp.broadcast_to(x, (size, *x.shape))
        for x, is_mapped in zip(state, batched[0], strict=True)
    ]
    # further levels of vmap see what is left of the others: one example of each
    left = [jnp.moveaxis(x, 0, -1)[..., 0] if is_mapped else x for x, is_mapped in zip(others, batched[1], strict=True)]
    # Called again for a `vmap` around this one, which may map what this one does not.
    return _mapped_as(each, left), [mapped] * len(each)
