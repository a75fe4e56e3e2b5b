"""The bits of float32 values as int32, and back."""

import jax
import jax.numpy as jnp
from jax import lax


def to_bits(x: jax.Array) -> jax.Array:
    """Return float32 bits as int32."""
    return lax.bitcast_convert_type(x, jnp.int32)


def from_bits(bits: jax.Array) -> jax.Array:
    """Return the float32 whose bits are the int32 `bits`."""
    return lax.bitcast_convert_type(bits, jnp.float32)
