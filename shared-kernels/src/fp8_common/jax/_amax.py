"""The reference of `amax`: an integer maximum over float bits, in jnp code, as `fp8_common.amax` defines it."""

from collections.abc import Sequence
from functools import partial, reduce

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from fp8_common.jax._arrays import as_input, float_key, from_bits


def amax(x: ArrayLike, axis: int | Sequence[int] | None = None, keepdims: bool = False) -> jax.Array:
    """Return max |x| over `axis` as float32; arguments and errors are those of `fp8_common.jax.amax`."""
    return _amax(as_input(x), axis=tuple(axis) if isinstance(axis, Sequence) else axis, keepdims=keepdims)


@partial(jax.jit, static_argnames=("axis", "keepdims"), inline=True)
def _amax(x: jax.Array, *, axis: int | tuple[int, ...] | None, keepdims: bool) -> jax.Array:
    keys = _keys(lax.stop_gradient(x))
    plain = partial(jnp.max, axis=axis, keepdims=keepdims, initial=0)
    if axis is None and _folds(x):
        # nowhere else: in an array that is sharded over devices, this would move data
        folded = partial(_max_of_folds, columns=_columns(x), shape=(1,) * x.ndim if keepdims else ())
        # Chosen when the program is lowered: it may be traced on a machine with another processor.
        return _value(lax.platform_dependent(keys, cpu=folded, default=plain), x.dtype)
    return _value(plain(keys), x.dtype)


FOLDS = 8
FOLD_FROM_BYTES = 1 << 20
"""Size from which folding pays for the time that it takes to compile."""


def _folds(x: jax.Array) -> bool:
    """Whether an array is large enough to fold, and folds without a rest; one with symbolic dimensions is not."""
    known = all(isinstance(n, int) for n in x.shape)
    return known and x.size * x.dtype.itemsize >= FOLD_FROM_BYTES and x.size % (FOLDS * _columns(x)) == 0


def _columns(x: jax.Array) -> int:
    return x.shape[-1] if x.ndim > 1 else FOLDS


def _keys(x: jax.Array) -> jax.Array:
    """Return what orders |x|, NaN last: bits without the sign, of 16-bit floats as float32, which holds them exactly.

    XLA on CPUs reduces floats several times faster than integers, and compiles that faster too. The floats themselves
    it may not reduce: its maximum loses NaN and takes subnormals for zero.
    """
    if x.dtype.itemsize == 4:
        return float_key(x)
    keys = lax.bitwise_and(lax.bitcast_convert_type(x, np.int16), np.int16(0x7FFF))
    return lax.convert_element_type(keys, np.float32)


def _value(keys: jax.Array, dtype: np.dtype) -> jax.Array:
    """Return the float32 magnitudes that keys stand for."""
    if dtype.itemsize == 4:
        return from_bits(keys)
    if dtype == jnp.bfloat16:
        # by bits, because a conversion may flush subnormals
        return from_bits(keys.astype(jnp.int32) << 16)
    return lax.bitcast_convert_type(keys.astype(jnp.int16), dtype).astype(jnp.float32)


def _max_of_folds(keys: jax.Array, *, columns: int, shape: tuple[int, ...]) -> jax.Array:
    """Return the maximum by comparing rows with rows first, which XLA on CPUs does several times faster."""
    folds = keys.reshape(-1, FOLDS, columns)
    largest = reduce(lax.max, (folds[:, i] for i in range(FOLDS)))
    return jnp.max(largest).reshape(shape)
