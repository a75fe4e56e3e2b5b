"""Decides how JAX finds the absolute maximum: an integer maximum over float bits, as in `fp8_common.amax`."""

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from fp8_common.jax.arrays import as_float32, float_key, from_bits


def amax(x: ArrayLike, axis: int | Sequence[int] | None = None, keepdims: bool = False) -> jax.Array:
    """Return max |x| over `axis` as float32, exactly; subnormals count although XLA flushes them.

    The gradient is zero. Across devices, combine amax by `jax.lax.pmax` of its bits.

    Args:
        x: float16, bfloat16 or float32, any shape.
        axis: Axis or axes to reduce; None reduces all. Static under jit.
        keepdims: Keep reduced axes with length 1. Static under jit.

    Returns:
        float32; 0 for an empty reduction, NaN if any reduced element is NaN, else inf if any is infinite.

    Raises:
        Fp8Error: `x` has another dtype.
    """
    axes = tuple(axis) if isinstance(axis, Sequence) else axis
    return _amax(as_float32(x), axis=axes, keepdims=keepdims)


@partial(jax.jit, static_argnames=("axis", "keepdims"), inline=True)
def _amax(x: jax.Array, *, axis: int | tuple[int, ...] | None, keepdims: bool) -> jax.Array:
    keys = float_key(lax.stop_gradient(x))
    return from_bits(jnp.max(keys, axis=axis, keepdims=keepdims, initial=0))
