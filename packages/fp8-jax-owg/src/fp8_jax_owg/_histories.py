"""Amax histories in loops: the newest entry goes through the loop, the rest is known before the loop starts.

All uses of a state return the same rolled history but for its first entry. So a loop combines first entries, and the
history rolls once, outside. A leaf is a history if its name, or that of a node it lies in, ends with `amax_history`,
as flax, praxis and this package name them; others go through a loop whole.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from fp8_common.jax import update_history
from fp8_jax_owg import _cotangent_encoding as cotangents

SUFFIX = "amax_history"


def split_histories(tree: Any) -> tuple[list[jax.Array], Callable[[list[jax.Array]], Any]]:
    """Return what a loop needs to combine, and what puts it back.

    Args:
        tree: Leaves float32 [...]; histories [..., length].

    Returns:
        (a list of leaves, in which histories are [..., 1]; a function of that list, for use in the loop, that returns
        the tree as it was).
    """
    found, structure = jax.tree_util.tree_flatten_with_path(tree)
    leaves = [leaf for _, leaf in found]
    rolls = [is_history(path) and jnp.ndim(leaf) > 0 for path, leaf in found]
    # The body sees the whole history, and its gradient goes through the newest entry alone.
    whole_leaves = [jax.lax.stop_gradient(leaf) for leaf in leaves]
    loose = [_newest(leaf) if roll else leaf for leaf, roll in zip(leaves, rolls, strict=True)]

    def rebuild(loose: list[jax.Array]) -> Any:
        rebuilt = [
            _with_newest(whole, leaf) if roll else leaf
            for whole, leaf, roll in zip(whole_leaves, loose, rolls, strict=True)
        ]
        return structure.unflatten(rebuilt)

    return loose, rebuild


def is_history(path: tuple[Any, ...]) -> bool:
    """Return whether the names along a path say that an amax history lies there."""
    return any(str(getattr(key, "key", getattr(key, "name", ""))).endswith(SUFFIX) for key in path)


@jax.custom_vjp
def _newest(history: jax.Array) -> jax.Array:
    return history[..., :1]


def _newest_backward(history: jax.Array, g: jax.Array) -> tuple[jax.Array]:
    # What was not observed is -inf now: `update_history` takes it for infinite and leaves that history as it was.
    seen = cotangents.decode(g)[..., 0]
    rolled, _ = update_history(jnp.moveaxis(history, -1, 0), seen)
    observed = jnp.where(cotangents.is_observed(seen), rolled, cotangents.NOT_OBSERVED)
    return (cotangents.encode(jnp.moveaxis(observed, 0, -1)),)


_newest.defvjp(lambda history: (_newest(history), history), _newest_backward)


@jax.custom_vjp
def _with_newest(history: jax.Array, newest: jax.Array) -> jax.Array:
    return history


# The newest entry is in `history` already: the second argument is there for its gradient alone.
_with_newest.defvjp(lambda history, newest: (history, None), lambda _, g: (jnp.zeros_like(g), g[..., :1]))
