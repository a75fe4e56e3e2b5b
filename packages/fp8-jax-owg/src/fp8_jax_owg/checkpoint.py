"""`upgrade` converts checkpoints whose FP8 state differs from the model's.

Stored state consists of float32 arrays in plain trees, so orbax saves and restores it like any other variable. The
functions here convert checkpoints without FP8 state, with another history length, with scales that multiply into FP8
(TransformerEngine), and with state that was cast to bfloat16 or is not finite.
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
    """Return the values of a checkpoint in the structure of `variables`.

    Parameters come from the checkpoint, cast to the dtype of the model. Overwritten leaves that it lacks are copied
    from `variables`. Histories keep their newest entries. An amax that is not finite becomes 0; a scale that is not
    finite and positive is copied from `variables`.

    Args:
        saved: Tree from a checkpoint, with or without overwritten leaves.
        variables: Variables from the model's `init`, which give the structure and the values of missing leaves. Or
            their shapes, from `jax.eval_shape`; missing FP8 state then starts with scale 1 and history 0.
        scales: "dequantize" if stored scales multiply codes back (flax and this package), "quantize" if they multiply
            into FP8 (TransformerEngine's `scale`).

    Returns:
        A tree with the structure, shapes and dtypes of `variables`.

    Raises:
        Fp8Error: If the checkpoint lacks a parameter, a parameter or a state has another shape, or `scales` is unknown.
    """
    if scales not in CONVENTIONS:
        raise Fp8Error(f"scales must be one of {', '.join(CONVENTIONS)}, got {scales!r}.")
    saved_leaves = dict(zip(names_of(saved), jax.tree.leaves(saved), strict=True))
    wanted, structure = jax.tree.flatten(variables)
    flags = owg_flags(variables)
    leaves = []
    for name, leaf, overwritten in zip(names_of(variables), wanted, flags, strict=True):
        convert = _convert_overwritten if overwritten else _convert_parameter
        leaves.append(convert(name, saved_leaves.get(name), leaf, scales))
    return structure.unflatten(leaves)


def resize_history(history: jax.Array, length: int) -> jax.Array:
    """Return amax histories of another length.

    The newest entries are kept; additional entries are zero.

    Args:
        history: float32 [..., L]. Slot 0 is the newest entry, the last slot the second newest, slot 1 the oldest.
        length: New length, at least 1.

    Returns:
        float32 [..., length].
    """
    # Slots are added or removed after slot 0, where the oldest entries are.
    older_slots = min(history.shape[-1], length) - 1
    zeros = jnp.zeros((*history.shape[:-1], length - 1 - older_slots), history.dtype)
    older = history[..., history.shape[-1] - older_slots :] if older_slots else history[..., :0]
    return jnp.concatenate([history[..., :1], zeros, older], axis=-1)


def _convert_parameter(name: tuple[str, ...], saved: Any, target: Any, scales: ScaleConvention) -> jax.Array:
    if saved is None:
        raise Fp8Error(f"The checkpoint lacks the parameter {'/'.join(name)} of shape {target.shape}.")
    if jnp.shape(saved) != target.shape:
        raise Fp8Error(
            f"The parameter {'/'.join(name)} has shape {jnp.shape(saved)} in the checkpoint and {target.shape} in the "
            "model. Make the model with the settings of the checkpoint."
        )
    return jnp.asarray(saved).astype(target.dtype)


def _convert_overwritten(name: tuple[str, ...], saved: Any, target: Any, scales: ScaleConvention) -> jax.Array:
    is_scale = name[-1].endswith("scale")
    if isinstance(target, jax.ShapeDtypeStruct):
        target = jnp.full(target.shape, is_scale, jnp.float32)
    if saved is None:
        return target
    value = jnp.asarray(saved).astype(jnp.float32)
    if value.size != target.size if is_scale else value.shape[:-1] != target.shape[:-1]:
        raise Fp8Error(f"The state {'/'.join(name)} has shape {value.shape} in the checkpoint, not {target.shape}.")
    if not is_scale:
        return resize_history(jnp.where(jnp.isfinite(value), value, jnp.float32(0)), target.shape[-1])
    value = value.reshape(target.shape)
    # TransformerEngine's `scale` multiplies into FP8. Its reciprocal is rounded once, like every scale here.
    inverse = value if scales == "dequantize" else reciprocal(value)
    return jnp.where(jnp.isfinite(inverse) & (inverse > 0), inverse, target)
