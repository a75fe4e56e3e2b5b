"""`upgrade`: the variables of a model from checkpoints of another shape.

Stored state is float32 arrays in plain trees, so orbax saves and restores it like any other variable. The functions
here convert checkpoints of another shape: without FP8 state, with another history length, with scales that multiply
into FP8 (TransformerEngine), with values that were cast to bfloat16 or went to infinity.
"""

import typing
from typing import Any, Literal

import jax
import jax.numpy as jnp

from fp8_common import Fp8Error
from fp8_common.jax import reciprocal
from fp8_jax_owg.state.pairs import names_of, owg_flags

ScaleConvention = Literal["dequantize", "quantize"]
CONVENTIONS: tuple[ScaleConvention, ...] = typing.get_args(ScaleConvention)


def upgrade(saved: Any, variables: Any, *, scales: ScaleConvention = "dequantize") -> Any:
    """Return a checkpoint's values in the structure of `variables`.

    Parameters come from the checkpoint, in the dtype of the model. Overwritten leaves missing there are copied from
    `variables`; histories keep their newest entries; scales and amax that are not finite are re-initialized.

    Args:
        saved: Tree from a checkpoint, with or without overwritten leaves.
        variables: From the model's `init`: the target structure, and the values of missing leaves. Or its shapes, from
            `jax.eval_shape`; missing FP8 state then starts with scale 1 and history 0.
        scales: "dequantize" if stored scales go back from FP8 (flax and this package), "quantize" if they multiply
            into FP8 (TransformerEngine's `scale`).

    Returns:
        A tree with the structure, shapes and dtypes of `variables`.

    Raises:
        Fp8Error: The checkpoint lacks a parameter, one has another shape, or `scales` is unknown.
    """
    if scales not in CONVENTIONS:
        raise Fp8Error(f"scales must be one of {', '.join(CONVENTIONS)}, got {scales!r}.")
    saved_leaves = dict(zip(names_of(saved), jax.tree.leaves(saved), strict=True))
    wanted, structure = jax.tree.flatten(variables)
    flags = owg_flags(variables)
    leaves = []
    for name, leaf, overwritten in zip(names_of(variables), wanted, flags, strict=True):
        take = _take_overwritten if overwritten else _take_parameter
        leaves.append(take(name, saved_leaves.get(name), leaf, scales))
    return structure.unflatten(leaves)


def resize_history(history: jax.Array, length: int) -> jax.Array:
    """Return amax histories of another length.

    The newest entries are kept; unknown ones are zero.

    Args:
        history: float32 [..., L]; slot 0 is the newest, the last slot the one before, slot 1 the oldest.
        length: The new L, at least 1.
    """
    # Slot 0 is the newest, the last slot the second newest: it is in between that slots come and go.
    kept = min(history.shape[-1], length) - 1
    zeros = jnp.zeros((*history.shape[:-1], length - 1 - kept), history.dtype)
    older = history[..., history.shape[-1] - kept :] if kept else history[..., :0]
    return jnp.concatenate([history[..., :1], zeros, older], axis=-1)


def _take_parameter(name: tuple[str, ...], found: Any, wanted: Any, scales: ScaleConvention) -> jax.Array:
    if found is None:
        raise Fp8Error(f"The checkpoint lacks the parameter {'/'.join(name)} of shape {wanted.shape}.")
    if jnp.shape(found) != wanted.shape:
        raise Fp8Error(
            f"The parameter {'/'.join(name)} has shape {jnp.shape(found)} in the checkpoint and {wanted.shape} in the "
            "model. Make the model with the settings of the checkpoint."
        )
    return jnp.asarray(found).astype(wanted.dtype)


def _take_overwritten(name: tuple[str, ...], found: Any, wanted: Any, scales: ScaleConvention) -> jax.Array:
    is_scale = name[-1].endswith("scale")
    if isinstance(wanted, jax.ShapeDtypeStruct):
        wanted = jnp.full(wanted.shape, is_scale, jnp.float32)
    if found is None:
        return wanted
    value = jnp.asarray(found).astype(jnp.float32)
    if value.size != wanted.size if is_scale else value.shape[:-1] != wanted.shape[:-1]:
        raise Fp8Error(f"The state {'/'.join(name)} has shape {value.shape} in the checkpoint, not {wanted.shape}.")
    if not is_scale:
        return resize_history(jnp.where(jnp.isfinite(value), value, jnp.float32(0)), wanted.shape[-1])
    value = value.reshape(wanted.shape)
    # TransformerEngine's `scale` goes into FP8. Its reciprocal is rounded once, like every scale here.
    inverse = value if scales == "dequantize" else reciprocal(value)
    return jnp.where(jnp.isfinite(inverse) & (inverse > 0), inverse, wanted)
