"""The reference of `amax`: an integer maximum over float bits, in jnp code, as `fp8_common.amax` defines it."""

from collections.abc import Sequence
from functools import partial, reduce

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from fp8_common.jax._arrays import as_float32, float_key, from_bits


def amax(x: ArrayLike, axis: int | Sequence[int] | None = None, keepdims: bool = False) -> jax.Array:
    """Return max |x| over `axis` as float32; arguments and errors are those of `fp8_common.jax.amax`."""
    return _amax(as_float32(x), axis=tuple(axis) if isinstance(axis, Sequence) else axis, keepdims=keepdims)


@partial(jax.jit, static_argnames=("axis", "keepdims"), inline=True)
def _amax(x: jax.Array, *, axis: int | tuple[int, ...] | None, keepdims: bool) -> jax.Array:
    keys = float_key(lax.stop_gradient(x))
    plain = partial(jnp.max, axis=axis, keepdims=keepdims, initial=0)
    columns = x.shape[-1] if x.ndim > 1 else FOLD_FROM // FOLDS
    if axis is None and x.size >= FOLD_FROM and x.size % (FOLDS * columns) == 0:
        # nowhere else: in an array that is sharded over devices, this would move data
        folded = partial(_max_of_folds, columns=columns, shape=(1,) * x.ndim if keepdims else ())
        return from_bits(lax.platform_dependent(keys, cpu=folded, default=plain))
    return from_bits(plain(keys))


FOLDS = 8
FOLD_FROM = 1 << 16
"""Number of elements from which folding pays."""


def _max_of_folds(keys: jax.Array, *, columns: int, shape: tuple[int, ...]) -> jax.Array:
    """Return the maximum by comparing rows with rows first.

    XLA on CPUs does that several times faster than it reduces integers. Its fast reduction of floats is no way out:
    it loses NaN and subnormals.
    """
    folds = keys.reshape(-1, FOLDS, columns)
    largest = reduce(lax.max, (folds[:, i] for i in range(FOLDS)))
    return jnp.max(largest).reshape(shape)
