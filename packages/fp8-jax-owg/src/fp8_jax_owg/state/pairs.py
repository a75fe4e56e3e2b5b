"""Pairs: the scale and the amax history of one tensor, found in any tree by the names that flax gives them.

At rest a pair is float32: `<tensor>_scale` [..., 1], which goes back from FP8, and `<tensor>_amax_history`
[..., length], newest entry first. A checkpoint of flax loads here and the other way round.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fp8_common import Fp8Error
from fp8_jax_owg.scaling import TENSORS, DelayedScaling, ScalingChoice, Tensor, as_scaling

SCALE, HISTORY = "_scale", "_amax_history"
"""Endings of the names of a scale and its history, those of flax."""
Meta = Mapping[str, jax.Array]
"""The leaves of one matmul by their names."""


class Pair(NamedTuple):
    """One tensor's state; fields are arrays, or their places among the leaves of a tree.

    Attributes:
        scale: At rest float32 [..., 1], that of the last observed step; inside of a loss the live leaf, see
            `fp8_jax_owg.state.live`.
        history: float32 [..., length], the amax of earlier steps.
    """

    scale: Any
    history: Any


def init_meta(scaling: ScalingChoice | None = None, tensors: tuple[Tensor, ...] = TENSORS) -> dict[str, jax.Array]:
    """Return the leaves of one matmul before its first step: scales 1, histories 0.

    Args:
        scaling: `DelayedScaling` or a recipe with delayed scaling, which gives the length of the histories; None
            stands for `DelayedScaling()`.
        tensors: Which tensors have leaves.

    Returns:
        float32 arrays `<tensor>_scale` (1,) and `<tensor>_amax_history` (length,).

    Raises:
        Fp8Error: The scaling has no state.
    """
    delayed = as_scaling(scaling or DelayedScaling())
    if not isinstance(delayed, DelayedScaling):
        raise Fp8Error(f"{delayed!r} has no state: leave meta out, or use DelayedScaling.")
    scales = {tensor + SCALE: jnp.ones(1, jnp.float32) for tensor in tensors}
    return scales | {tensor + HISTORY: jnp.zeros(delayed.amax_history_length, jnp.float32) for tensor in tensors}


def find_pairs(tree: Any) -> list[Pair]:
    """Return where the pairs of a tree lie among its leaves, in the order of their scales."""
    paths, _ = jax.tree_util.tree_flatten_with_path(tree)
    places = {_names(path): place for place, (path, _) in enumerate(paths)}
    found = []
    for names, place in places.items():
        # At every place of the path, not only the last one: variables and boxes put keys of their own behind the name.
        for i, name in enumerate(names):
            partner = (*names[:i], name.removesuffix(SCALE) + HISTORY, *names[i + 1 :])
            if name.endswith(SCALE) and partner in places:
                found.append(Pair(place, places[partner]))
    return found


def take(leaves: Sequence[Any], pair: Pair) -> Pair:
    """Return the arrays at the places of a pair."""
    return Pair(leaves[pair.scale], leaves[pair.history])


def pair_of(meta: Meta, tensor: Tensor) -> Pair:
    """Return the leaves of one tensor.

    Raises:
        Fp8Error: One is missing.
    """
    names = tensor + SCALE, tensor + HISTORY
    if missing := [name for name in names if name not in meta]:
        raise Fp8Error(
            f"The FP8 state lacks {', '.join(missing)}; it has {', '.join(meta) or 'nothing'}. "
            "Make it with init_meta, or with the init of the layer."
        )
    return Pair(*(meta[name] for name in names))


def _names(path: tuple[Any, ...]) -> tuple[str, ...]:
    return tuple(str(getattr(key, "key", getattr(key, "name", getattr(key, "idx", None)))) for key in path)
