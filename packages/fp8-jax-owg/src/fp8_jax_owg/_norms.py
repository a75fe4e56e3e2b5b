"""Clipping and maps of gradients: of parameters alone, next values of overwritten leaves are left out."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from fp8_jax_owg._marker import map_leaves, split


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
    leaves = jax.tree.leaves(split(gradients)[0])
    # The absolute value first makes complex gradients real; in float32, because squares of float16 overflow from 256
    # on.
    squares = [jnp.sum(jnp.square(jnp.abs(leaf).astype(jnp.float32))) for leaf in leaves]
    norm = jnp.sqrt(sum(squares, start=jnp.float32(0)))
    # No division by zero where all gradients are zero.
    factor = jnp.minimum(jnp.float32(1), jnp.asarray(max_norm, jnp.float32) / jnp.maximum(norm, jnp.float32(1e-30)))
    # Exactly 1 where nothing is clipped, so that gradients keep their bits.
    factor = jnp.where(norm < max_norm, jnp.float32(1), factor)
    return map_parameters(lambda g: g * factor.astype(g.dtype), gradients)


def map_parameters(fn: Callable[[jax.Array], Any], tree: Any) -> Any:
    """Return the tree with `fn` of every parameter, for loss scaling, averages and casts; overwritten leaves stay.

    Args:
        fn: Called with each leaf that is not overwritten.
        tree: Variables, or gradients from `value_and_grad` or `accumulate`.
    """
    return map_leaves(fn, lambda x: x, tree)
