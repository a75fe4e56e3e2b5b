"""Sums of gradients over devices that travel as FP8 codes: `compressed_psum_scatter` and `compressed_psum`.

Codes, scales and gathered sums are sent as uint8. What arrives is decoded and added in float32, in the order of
devices: the same bits on every run, those of `fp8_common.sum_of_compressed`.
"""

import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from fp8_common import POWER_OF_2, Fp8Error, Fp8UnsupportedError, GradientCompression
from fp8_common.jax import dequantize_blockwise, quantize_blockwise
from fp8_jax_owg._dot import as_operand

AxisNames = str | Sequence[str]
_SCALE_BYTES = 4


def compressed_psum_scatter(
    x: ArrayLike, axis_name: AxisNames, *, axis: int = 0, compression: GradientCompression | None = None
) -> jax.Array:
    """Return this device's slice of the sum of `x` over a mesh axis: a reduce-scatter of one byte per element.

    Inside a `shard_map`. As `jax.lax.psum_scatter(x, axis_name, scatter_dimension=axis, tiled=True)`, except that each
    device rounds its part for another one to FP8; see `fp8_common.GradientCompression` for the error.

    Args:
        x: float32, bfloat16 or float16 [..., n * m, ...], with n devices along `axis_name`.
        axis_name: The mesh axis, or axes.
        axis: The dimension that is cut, of n * m elements.
        compression: How elements are rounded; None is `GradientCompression()`.

    Returns:
        [..., m, ...] in the dtype of `x`, rounded once from the float32 sum. Infinite and NaN elements arrive as NaN.

    Raises:
        Fp8Error: `x` cannot be cut into equal parts.
        Fp8UnsupportedError: The compression asks for more than rounding to nearest: a compiled function has no state.
    """
    array, how = as_operand(x, "x"), supported(compression)
    devices = lax.axis_size(as_names(axis_name))
    size = array.shape[axis]
    if size % devices:
        raise Fp8Error(
            f"compressed_psum_scatter cuts dimension {axis} for {devices} devices, and it has {size} elements. Pad it "
            "to a multiple."
        )
    # the dimension that is cut comes first, so that what one device gets is one row
    first = jnp.moveaxis(array, axis, 0)
    rows = first.reshape(devices, -1)
    total = _sum_of_rows(rows, as_names(axis_name), how)
    part = total.reshape(size // devices, *first.shape[1:]).astype(array.dtype)
    return jnp.moveaxis(part, 0, axis)


def compressed_psum(x: ArrayLike, axis_name: AxisNames, *, compression: GradientCompression | None = None) -> jax.Array:
    """Return the sum of `x` over a mesh axis: every device adds a part and sends the sum, rounded to FP8 once more.

    Inside a `shard_map`, for replicated parameters. All devices get the same bits; two bytes per element travel where
    `jax.lax.psum` of float32 sends eight.

    Args:
        x: float32, bfloat16 or float16, any shape.
        axis_name: The mesh axis, or axes.
        compression: How elements are rounded; None is `GradientCompression()`.

    Returns:
        The shape and dtype of `x`.

    Raises:
        Fp8UnsupportedError: The compression asks for more than rounding to nearest.
    """
    array, how = as_operand(x, "x"), supported(compression)
    names = as_names(axis_name)
    devices = lax.axis_size(names)
    flat = jnp.pad(array.reshape(-1), (0, -array.size % devices))
    own = _sum_of_rows(flat.reshape(devices, -1), names, how)
    gathered = lax.all_gather(_packed(own[None], how), names, axis=0, tiled=True)
    return _unpacked(gathered, own.size, how).reshape(-1)[: array.size].reshape(array.shape).astype(array.dtype)


def supported(compression: GradientCompression | None) -> GradientCompression:
    """Return the compression, or the default one.

    Raises:
        Fp8UnsupportedError: It asks for more than rounding to nearest.
    """
    how = compression or GradientCompression()
    if how.rounding != "nearest" or how.error_feedback:
        raise Fp8UnsupportedError(
            f"Gradients in JAX are rounded to nearest, without state; got {how}. Leave rounding and error_feedback at "
            "their defaults."
        )
    return how


def as_names(axis_name: AxisNames) -> str | tuple[str, ...]:
    """Return names of mesh axes in a form that can be hashed."""
    return axis_name if isinstance(axis_name, str) else tuple(axis_name)


def _sum_of_rows(rows: jax.Array, names: str | tuple[str, ...], how: GradientCompression) -> jax.Array:
    """Return the float32 sum [m] over devices of this device's row of `rows` [n, m]."""
    received = lax.all_to_all(_packed(rows, how), names, split_axis=0, concat_axis=0, tiled=True)
    # one after the other, because a reduction by XLA may add in any order
    return functools.reduce(jnp.add, list(_unpacked(received, rows.shape[1], how)))


def _packed(rows: jax.Array, how: GradientCompression) -> jax.Array:
    """Return uint8 rows that hold the codes of `rows` [n, m] and then their scales."""
    codes, scales = quantize_blockwise(rows, how.format, (1, how.block), POWER_OF_2)
    as_bytes = lax.bitcast_convert_type(scales, jnp.uint8).reshape(rows.shape[0], -1)
    return jnp.concatenate([lax.bitcast_convert_type(codes, jnp.uint8), as_bytes], axis=1)


def _unpacked(rows: jax.Array, length: int, how: GradientCompression) -> jax.Array:
    """Return the float32 values [n, length] that rows of `_packed` hold."""
    blocks = math.ceil(length / how.block)
    codes = lax.bitcast_convert_type(rows[:, :length], how.fp8_format.numpy_dtype)
    scales = rows[:, length:].reshape(rows.shape[0], blocks, _SCALE_BYTES)
    values = dequantize_blockwise(
        codes, lax.bitcast_convert_type(scales, jnp.float32), how.format, block=(1, how.block)
    )
    return values.astype(jnp.float32)
