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
from fp8_jax_owg._scaling import TENSORS, DelayedScaling, Tensor, by_channel
from fp8_jax_owg._sharing import as_float32

Meta = Mapping[str, jax.Array]
"""The leaves of one product by their names."""


class TensorMeta(NamedTuple):
    """The two leaves of one tensor.

    Attributes:
        scale: float32 (1,), multiplies FP8 values back; that of the last observed step. Of a kernel with a scale for
            each output feature (channels, 1).
        history: float32 (length,), the amax of earlier steps; likewise (channels, length).
    """

    scale: jax.Array
    history: jax.Array


def init_meta(
    scaling: ScalingChoice | None = None, tensors: tuple[Tensor, ...] = TENSORS, channels: int | None = None
) -> dict[str, jax.Array]:
    """Return the leaves of one product before its first step: scales 1, histories 0.

    Args:
        scaling: `DelayedScaling` or a recipe with delayed scaling, which gives the length of the histories; None
            stands for `DelayedScaling()`.
        tensors: Which tensors have leaves.
        channels: How many output features the kernel has, the product of its dimensions that are not summed over; for
            `kernel_granularity="channel"`.

    Returns:
        float32 arrays `<tensor>_scale` (1,) and `<tensor>_amax_history` (length,); of a kernel with a scale for each
        output feature (channels, 1) and (channels, length).

    Raises:
        Fp8Error: The scaling has no state, or `channels` is missing.
    """
    delayed = as_scaling(scaling or DelayedScaling())
    if not isinstance(delayed, DelayedScaling):
        raise Fp8Error(f"{delayed!r} has no state: leave meta out, or use DelayedScaling.")
    length = delayed.amax_history_length
    lead = {tensor: _channels(channels) if by_channel(tensor, delayed) else () for tensor in tensors}
    scales = {f"{tensor}_scale": jnp.ones((*lead[tensor], 1), jnp.float32) for tensor in tensors}
    histories = {f"{tensor}_amax_history": jnp.zeros((*lead[tensor], length), jnp.float32) for tensor in tensors}
    return scales | histories


def _channels(channels: int | None) -> tuple[int]:
    if channels is None:
        raise Fp8Error('kernel_granularity="channel" needs the number of output features: pass channels=...')
    return (channels,)


def tensor_meta(meta: Meta, tensor: Tensor, channels: int | None = None) -> TensorMeta:
    """Return the leaves of one tensor.

    Args:
        meta: The leaves of a product.
        tensor: Which tensor.
        channels: How many scales it has; None is one for the tensor.

    Raises:
        Fp8Error: A leaf is missing, is not float32, or has another shape.
    """
    names = f"{tensor}_scale", f"{tensor}_amax_history"
    if missing := [name for name in names if name not in meta]:
        raise Fp8Error(
            f"The FP8 state lacks {', '.join(missing)}; it has {', '.join(meta) or 'nothing'}. "
            "Make it with init_meta, or with the init of the layer."
        )
    return read_tensor_meta(*(meta[name] for name in names), name=tensor, channels=channels)


def read_tensor_meta(scale: jax.Array, history: jax.Array, name: str = "", channels: int | None = None) -> TensorMeta:
    """Return the leaves of one tensor as float32; inside `value_and_grad` they come as `fp32_max_grad`.

    Raises:
        Fp8Error: They have another dtype, or other shapes than (1,) and (length,), with `channels` in front.
    """
    scale, history = as_float32((scale, history))
    lead = () if channels is None else (channels,)
    if scale.shape != (*lead, 1) or history.shape[:-1] != lead or history.ndim == 0 or history.shape[-1] == 0:
        front = "" if channels is None else f"{channels}, "
        raise Fp8Error(
            f"{name or 'An FP8'} scale must have shape ({front}1{'' if front else ','}) and its amax history "
            f"({front}length{'' if front else ','}) with length >= 1, got {scale.shape} and {history.shape}. "
            "Use vmap for stacked layers, and a scaling whose kernel_granularity is that of the state."
        )
    return TensorMeta(scale, history)
