"""Norms, clipping and scaling of gradients: of parameters alone, next values of overwritten leaves are left out."""

from typing import Any

import jax
import jax.numpy as jnp

from fp8_jax_owg._marker import map_leaves, split


def global_norm(gradients: Any) -> jax.Array:
    """Return the L2 norm over the gradients of all parameters, float32 []."""
    leaves = jax.tree.leaves(split(gradients)[0])
    # The absolute value first makes complex gradients real; in float32, because squares of float16 overflow from 256
    # on.
    squares = [jnp.sum(jnp.square(jnp.abs(leaf).astype(jnp.float32))) for leaf in leaves]
    return jnp.sqrt(sum(squares, start=jnp.float32(0)))


def all_finite(gradients: Any) -> jax.Array:
    """Return whether the gradients of all parameters are finite, bool []: whether the step may be taken.

    An infinite or NaN element of an input, kernel or output gradient is NaN after the cast to FP8, and so is what is
    computed from it, so it shows here. Finite values saturate, and do not. For `apply_gradients(valid=...)` and
    `where_step_valid`.
    """
    leaves = jax.tree.leaves(split(gradients)[0])
    return jnp.all(jnp.stack([jnp.all(jnp.isfinite(leaf)) for leaf in leaves] or [jnp.bool_(True)]))


def clip_by_global_norm(gradients: Any, max_norm: float | jax.Array) -> Any:
    """Return the gradients of parameters scaled down to a norm of at most `max_norm`; overwritten leaves stay.

    Args:
        gradients: From `value_and_grad`.
        max_norm: The limit.
    """
    norm = global_norm(gradients)
    # No division by zero where all gradients are zero.
    factor = jnp.minimum(jnp.float32(1), jnp.asarray(max_norm, jnp.float32) / jnp.maximum(norm, jnp.float32(1e-30)))
    # Exactly 1 where nothing is clipped, so that gradients keep their bits.
    return scale_gradients(gradients, jnp.where(norm < max_norm, jnp.float32(1), factor))


def scale_gradients(gradients: Any, factor: Any) -> Any:
    """Return the gradients of parameters times `factor`, for loss scaling and averages; overwritten leaves stay.

    Args:
        gradients: From `value_and_grad` or `accumulate`.
        factor: A number or a scalar array.
    """
    return map_leaves(lambda g: g * jnp.asarray(factor, g.dtype), lambda g: g, gradients)
