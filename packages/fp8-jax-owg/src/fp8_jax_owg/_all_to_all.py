"""`fp8_all_to_all`: tokens that travel to the devices of their experts as FP8 codes, each with a scale of its own."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from fp8_common import CANONICAL, Fp8Error, ScalePolicy, get_format
from fp8_common.jax import dequantize, quantize_rowwise
from fp8_jax_owg._dot import as_operand
from fp8_jax_owg._first_order import first_order_only
from fp8_jax_owg._gradients import AxisNames, as_names

_SCALE_BYTES = 4


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Exchange:
    """What is static about an exchange; formats are None where values travel in their own dtype."""

    names: str | tuple[str, ...]
    split_axis: int
    concat_axis: int
    fmt: str | None
    of_gradient: str | None
    policy: ScalePolicy

    def back(self) -> "_Exchange":
        """Return the way of the gradient."""
        return dataclasses.replace(
            self, split_axis=self.concat_axis, concat_axis=self.split_axis, fmt=self.of_gradient, of_gradient=self.fmt
        )


def fp8_all_to_all(
    x: ArrayLike,
    axis_name: AxisNames,
    split_axis: int,
    concat_axis: int,
    *,
    fp8_format: str | None = "e4m3",
    gradient_format: str | None = None,
    policy: ScalePolicy = CANONICAL,
) -> jax.Array:
    """`jax.lax.all_to_all(..., tiled=True)` whose rows travel as FP8 codes, inside a `shard_map`.

    What arrives are the values that codes and scales stand for: bit for bit those of a cast and its decoding before a
    plain exchange. A row of n bfloat16 values takes n + 4 bytes in the place of 2 n.

    Args:
        x: float32, bfloat16 or float16 [..., features]; each row along the last dimension has a scale.
        axis_name: The mesh axis, or axes.
        split_axis: The dimension that is cut for the devices, not the last one.
        concat_axis: The dimension along which their parts are joined, not the last one.
        fp8_format: How rows are rounded; None sends them in the dtype of `x`.
        gradient_format: The same for the gradient, on its way back.
        policy: How the amax of a row becomes its scale.

    Returns:
        As `jax.lax.all_to_all`, in the dtype of `x`.

    Raises:
        Fp8Error: A dimension is the last one or none of `x`, or cannot be cut into equal parts; a format is unknown.
        Fp8UnsupportedError: A second derivative was asked for.
    """
    array, names = as_operand(x, "x"), as_names(axis_name)
    axes = [axis + array.ndim if axis < 0 else axis for axis in (split_axis, concat_axis)]
    if not all(0 <= axis < array.ndim - 1 for axis in axes):
        raise Fp8Error(
            "fp8_all_to_all cuts and joins dimensions before the last, along which each row has a scale; got "
            f"split_axis={split_axis} and concat_axis={concat_axis} for an array of shape {array.shape}."
        )
    devices = lax.axis_size(names)
    if array.shape[axes[0]] % devices:
        raise Fp8Error(
            f"fp8_all_to_all cuts dimension {split_axis} for {devices} devices, and it has {array.shape[axes[0]]} "
            "elements. Pad it to a multiple."
        )
    formats = [None if fmt is None else get_format(fmt).name for fmt in (fp8_format, gradient_format)]
    how = _Exchange(
        names=names,
        split_axis=axes[0],
        concat_axis=axes[1],
        fmt=formats[0],
        of_gradient=formats[1],
        policy=policy,
    )
    return _exchange(how, array)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _exchange(how: _Exchange, x: jax.Array) -> jax.Array:
    return _sent(how, x)


def _exchange_fwd(how: _Exchange, x: jax.Array) -> tuple[jax.Array, None]:
    return _sent(how, first_order_only(x)), None


def _exchange_bwd(how: _Exchange, _: None, g: jax.Array) -> tuple[jax.Array]:
    return (_sent(how.back(), first_order_only(g)),)


_exchange.defvjp(_exchange_fwd, _exchange_bwd)


def _sent(how: _Exchange, x: jax.Array) -> jax.Array:
    exchange = partial(
        lax.all_to_all,
        axis_name=how.names,
        split_axis=how.split_axis,
        concat_axis=how.concat_axis,
        tiled=True,
    )
    if how.fmt is None:
        return exchange(x)
    codes, scale = quantize_rowwise(x, how.fmt, policy=how.policy)
    # as bytes, and one message: XLA on CPUs widens float8, and scales would be a second collective
    as_bytes = lax.bitcast_convert_type(scale, jnp.uint8).reshape(*x.shape[:-1], _SCALE_BYTES)
    arrived = exchange(jnp.concatenate([lax.bitcast_convert_type(codes, jnp.uint8), as_bytes], axis=-1))
    data = lax.bitcast_convert_type(arrived[..., : x.shape[-1]], get_format(how.fmt).numpy_dtype)
    scales = lax.bitcast_convert_type(arrived[..., None, x.shape[-1] :], jnp.float32)
    return dequantize(data, scales, how.fmt, x.dtype)
