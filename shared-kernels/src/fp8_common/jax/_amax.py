"""The reference of `amax`: an integer maximum over float bits, in jnp code, as `fp8_common.amax` defines it."""

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from fp8_common._reference.scaling import KEY_MASK, MIN_NORMAL_KEY
from fp8_common.jax.arrays import as_input, float_key, from_bits, to_bits


def amax(x: ArrayLike, axis: int | Sequence[int] | None = None, keepdims: bool = False) -> jax.Array:
    """Return max |x| over `axis` as float32; arguments and errors are those of `fp8_common.jax.amax`."""
    return _amax(as_input(x), axis=tuple(axis) if isinstance(axis, Sequence) else axis, keepdims=keepdims)


@partial(jax.jit, static_argnames=("axis", "keepdims"), inline=True)
def _amax(x: jax.Array, *, axis: int | tuple[int, ...] | None, keepdims: bool) -> jax.Array:
    keys = _keys(lax.stop_gradient(x))
    plain = partial(_greatest, axis=axis, keepdims=keepdims)
    if axis is None and _folds(x):
        # nowhere else: in an array that is sharded over devices, this would move data
        folded = partial(_greatest_of_folds, columns=_columns(x), shape=(1,) * x.ndim if keepdims else ())
        # Chosen when the program is lowered: it may be traced on a machine with another processor.
        return _value(lax.platform_dependent(keys, cpu=folded, default=plain), x.dtype)
    return _value(plain(keys), x.dtype)


FOLDS = 8
FOLD_FROM_BYTES = 1 << 16
"""Size from which folding pays for the time that it takes to compile."""
MIDDLE_KEY = np.int32(0x40000000)
"""The key that `_ordered` makes the smallest positive normal number of; keys below it become negative ones."""
LOWEST = np.uint32(0xC07FFFFF).view(np.float32)
"""What `_ordered` makes of the key 0 of a float32."""


def _folds(x: jax.Array) -> bool:
    """Whether an array is large enough to fold, and folds without a rest.

    One with symbolic dimensions is not; one whose type says how it is sharded cannot be reshaped so.
    """
    known = all(isinstance(n, int) for n in x.shape) and not any(jax.typeof(x).sharding.spec)
    return known and x.size * x.dtype.itemsize >= FOLD_FROM_BYTES and x.size % (FOLDS * _columns(x)) == 0


def _columns(x: jax.Array) -> int:
    return x.shape[-1] if x.ndim > 1 else FOLDS


def _keys(x: jax.Array) -> jax.Array:
    """Return integers of the width of `x` that order |x|, NaN last: bits without the sign."""
    if x.dtype.itemsize == 4:
        return float_key(x)
    return lax.bitwise_and(lax.bitcast_convert_type(x, np.int16), np.int16(0x7FFF))


def _greatest(keys: jax.Array, axis: int | tuple[int, ...] | None, keepdims: bool) -> jax.Array:
    """Return the greatest key as `_ordered` has it; that of zero where there is none."""
    lowest = LOWEST if keys.dtype == np.int32 else np.float32(0)
    return jnp.max(_ordered(keys), axis=axis, keepdims=keepdims, initial=lowest)


def _ordered(keys: jax.Array) -> jax.Array:
    """Return normal float32 numbers, or zeros, that sort as keys do.

    XLA on CPUs reduces floats several times faster than integers, and compiles that faster too. Those of an array it
    may not reduce: its maximum loses NaN and takes subnormals for zero.
    """
    if keys.dtype == np.int16:
        return lax.convert_element_type(keys, np.float32)
    # The sum takes all of them away from the subnormals.
    return from_bits(lax.add(_flipped(lax.sub(keys, MIDDLE_KEY)), np.int32(MIN_NORMAL_KEY)))


def _flipped(bits: jax.Array) -> jax.Array:
    """Return int32 with the order of negative ones turned round: of negative floats the greater has smaller bits."""
    return lax.bitwise_xor(bits, lax.bitwise_and(lax.shift_right_arithmetic(bits, np.int32(31)), np.int32(KEY_MASK)))


def _value(greatest: jax.Array, dtype: np.dtype) -> jax.Array:
    """Return the float32 magnitudes that greatest keys stand for."""
    if dtype.itemsize == 4:
        return from_bits(lax.add(_flipped(lax.sub(to_bits(greatest), np.int32(MIN_NORMAL_KEY))), MIDDLE_KEY))
    if dtype == jnp.bfloat16:
        # by bits, because a conversion may flush subnormals
        return from_bits(greatest.astype(jnp.int32) << 16)
    return lax.bitcast_convert_type(greatest.astype(jnp.int16), dtype).astype(jnp.float32)


def _greatest_of_folds(keys: jax.Array, *, columns: int, shape: tuple[int, ...]) -> jax.Array:
    """Return `_greatest`, comparing rows with rows first, which XLA on CPUs does several times faster."""
    # Behind a barrier, or XLA makes one reduction of the two.
    largest = lax.optimization_barrier(jnp.max(keys.reshape(-1, FOLDS, columns), axis=1))
    return jnp.max(_ordered(largest)).reshape(shape)
