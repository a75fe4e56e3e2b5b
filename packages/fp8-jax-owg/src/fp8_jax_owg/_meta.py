"""The state of one product: a scale and an amax history for input, kernel and output gradient.

Names and shapes are flax's: six float32 leaves, `<tensor>_scale` of shape (1,), which goes back from FP8, and
`<tensor>_amax_history` of shape (length,), newest entry first. A checkpoint of either library loads in the other.
"""

from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fp8_common import Fp8Error
from fp8_jax_owg._recipes import ScalingChoice, as_scaling
from fp8_jax_owg._scaling import TENSORS, DelayedScaling, Tensor
from fp8_jax_owg._sharing import as_float32

Meta = Mapping[str, jax.Array]
"""The leaves of one product by their names."""


class TensorMeta(NamedTuple):
    """The two leaves of one tensor.

    Attributes:
        scale: float32 (1,), multiplies FP8 values back; that of the last observed step.
        history: float32 (length,), the amax of earlier steps.
    """

    scale: jax.Array
    history: jax.Array


def init_meta(scaling: ScalingChoice | None = None, tensors: tuple[Tensor, ...] = TENSORS) -> dict[str, jax.Array]:
    """Return the leaves of one product before its first step: scales 1, histories 0.

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
    scales = {f"{tensor}_scale": jnp.ones(1, jnp.float32) for tensor in tensors}
    length = delayed.amax_history_length
    return scales | {f"{tensor}_amax_history": jnp.zeros(length, jnp.float32) for tensor in tensors}


def tensor_meta(meta: Meta, tensor: Tensor) -> TensorMeta:
    """Return the leaves of one tensor.

    Args:
        meta: The leaves of a product.
        tensor: Which tensor.

    Raises:
        Fp8Error: A leaf is missing, is not float32, or has another shape.
    """
    names = f"{tensor}_scale", f"{tensor}_amax_history"
    if missing := [name for name in names if name not in meta]:
        raise Fp8Error(
            f"The FP8 state lacks {', '.join(missing)}; it has {', '.join(meta) or 'nothing'}. "
            "Make it with init_meta, or with the init of the layer."
        )
    return read_tensor_meta(*(meta[name] for name in names), name=tensor)


def read_tensor_meta(scale: jax.Array, history: jax.Array, name: str = "") -> TensorMeta:
    """Return the leaves of one tensor as float32; inside `value_and_grad` they come as `fp32_max_grad`.

    Raises:
        Fp8Error: They have another dtype, or other shapes than (1,) and (length,).
    """
    scale, history = as_float32((scale, history))
    if scale.shape != (1,) or history.ndim != 1 or history.shape[0] == 0:
        raise Fp8Error(
            f"{name or 'An FP8'} scale must have shape (1,) and its amax history (length,) with length >= 1, got "
            f"{scale.shape} and {history.shape}. Use vmap for stacked layers."
        )
    return TensorMeta(scale, history)
