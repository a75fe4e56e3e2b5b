"""The amax history of delayed scaling: its roll and its reduction, as `fp8_common._history` defines them."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from fp8_common._amax import INF_KEY
from fp8_common._history import check_history
from fp8_common._policy import HistoryAlgo
from fp8_common.jax._arrays import as_float32, float_key, from_bits


def update_history(history: ArrayLike, amax: ArrayLike, algo: HistoryAlgo = "max") -> tuple[jax.Array, jax.Array]:
    """Record one observation per tensor and return the amax that the next scale is made from.

    An infinite or NaN amax is not recorded: the history of that tensor stays as it was. The gradient is zero.

    Args:
        history: float32 [L, ...], slot 0 is the newest.
        amax: float32 [...], this step's amax.
        algo: "max" over the history, or "most_recent" (slot 0); static under jit.

    Returns:
        (new history [L, ...], amax for the next scale [...]), both float32.

    Raises:
        Fp8Error: Shapes do not fit, the history is empty, `algo` is unknown, or a dtype is not supported.
    """
    old = lax.stop_gradient(as_float32(history, "history"))
    key = float_key(lax.stop_gradient(as_float32(amax, "amax")))
    check_history(old.shape, key.shape, algo)
    # `from_bits(key)` and not `amax`: without its sign.
    rolled = jnp.concatenate([from_bits(key)[None], jnp.roll(old, -1, axis=0)[1:]])
    updated = jnp.where(key >= INF_KEY, old, rolled)
    return updated, reduce_history(updated, algo)


def reduce_history(history: jax.Array, algo: HistoryAlgo) -> jax.Array:
    """Return the amax [...] that a float32 history [L, ...] stands for."""
    return from_bits(jnp.max(float_key(history), axis=0)) if algo == "max" else history[0]
