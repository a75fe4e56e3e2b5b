"""Casts with one scale per slice: rows, columns, or both.

`cast_slices` and `cast_slices_both` are for plugins.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from fp8_common._reference.quantize import Quantized
from fp8_common.formats import Format, get_data_format
from fp8_common.jax._kernels import KernelOp, selects_kernels
from fp8_common.jax._scales import amax_to_scale
from fp8_common.jax.casts import amax_by_jnp, cast, cast_by_jnp, quantize_by_jnp
from fp8_common.jax.numerics import as_float32, from_bits, to_bits
from fp8_common.policy import CANONICAL, ScalePolicy


def quantize_rowwise(x: ArrayLike, fmt: str | Format, axis: int = -1, policy: ScalePolicy = CANONICAL) -> Quantized:
    """Quantize with one scale for each slice along `axis`.

    Args:
        x: float16, bfloat16 or float32, any shape of at least one dimension.
        fmt: FP8 format.
        axis: Axis whose elements share a scale. For a matrix, -1 gives a scale per row, 0 a scale per column.
        policy: Rule for the scales.

    Returns:
        float8 data of the shape of `x`, and float32 scales of that shape with `axis` of length 1.

    Raises:
        Fp8Error: If the dtype or the format is not supported.
    """
    as_float32(x)
    return Quantized(*_ROWS(x, axis=axis, fmt=get_data_format(fmt), policy=policy))


def cast_slices(x: jax.Array, fmt: Format, axes: tuple[int, ...], policy: ScalePolicy) -> tuple[jax.Array, jax.Array]:
    """Cast with one scale for each slice along `axes`.

    The bits equal `cast` with the scales of `amax_to_scale`.

    Args:
        x: float16, bfloat16 or float32, any shape.
        fmt: FP8 format; static under jit.
        axes: Axes whose elements share a scale; static under jit.
        policy: Rule for the scales; static under jit.

    Returns:
        float8 data of the shape of `x`, and float32 scales of that shape with `axes` of length 1.
    """
    if len(axes) == 1 and x.ndim > 1 and selects_kernels():
        # The kernel reads rows. XLA's matmuls need the contracted dimension last, so the transpose is needed anyway.
        data, scale = _ROWS(jnp.moveaxis(x, axes[0], -1), axis=-1, fmt=fmt, policy=policy)
        return jnp.moveaxis(data, -1, axes[0]), jnp.moveaxis(scale, -1, axes[0])
    scale = amax_to_scale(amax_by_jnp(x, axis=axes, keepdims=True), fmt, policy)
    return cast(x, scale, fmt), scale


def _rows(x: jax.Array, *, axis: int, fmt: Format, policy: ScalePolicy) -> tuple[jax.Array, jax.Array]:
    scale = amax_to_scale(amax_by_jnp(x, axis=axis, keepdims=True), fmt, policy)
    return quantize_by_jnp(x, scale, fmt=fmt), scale


def _plan_of_rows(plans: Any, x: Any, *, axis: int, fmt: Format, policy: ScalePolicy) -> Any:
    return plans.rowwise(*as_matrix(x), str(x.dtype), fmt, policy, inverse=False)


def as_matrix(x: Any) -> tuple[int, int]:
    """Return the rows and columns of an array as a matrix."""
    return math.prod(x.shape[:-1]), x.shape[-1]


_ROWS = KernelOp(
    name="fp8_rowwise",
    reference=_rows,
    plan=_plan_of_rows,
    fits=lambda x, *, axis, fmt, policy: x.ndim > 0 and axis % x.ndim == x.ndim - 1,  # along the last axis
)


def cast_slices_both(
    x: jax.Array, fmt: Format, split: int, policy: ScalePolicy
) -> tuple[tuple[jax.Array, jax.Array], tuple[jax.Array, jax.Array]]:
    """Cast with scales over the trailing, and over the leading dimensions.

    The second cast is transposed. Kernels read `x` twice.

    Args:
        x: float16, bfloat16 or float32, at least two dimensions.
        fmt: FP8 format; static under jit.
        split: Number of leading dimensions; static under jit.
        policy: Rule for the scales; static under jit.

    Returns:
        Data of the shape of `x` with one scale for each index of the leading dimensions, and data with the leading
        dimensions moved to the end, with one scale for each index of the trailing dimensions. Scales have length 1
        along the dimensions that share a scale.
    """
    (keys,) = _AMAX_BOTH(x, split=split)
    scale = amax_to_scale(from_bits(keys), fmt, policy)
    data, transposed = _CAST_BOTH(x, scale, fmt=fmt, split=split)
    rows, columns = _apart(scale, x.shape, split)
    return (data, rows), (transposed, columns.reshape(*x.shape[split:], *[1] * split))


def _apart(scale: jax.Array, shape: tuple[int, ...], split: int) -> tuple[jax.Array, jax.Array]:
    """Return scales of rows and of columns that broadcast to `shape`."""
    rows, columns = shape[:split], shape[split:]
    size = math.prod(rows)
    return scale[:size].reshape(*rows, *[1] * len(columns)), scale[size:].reshape(*[1] * split, *columns)


def _keys_both(x: jax.Array, *, split: int) -> tuple[jax.Array]:
    keys = [amax_by_jnp(x, axis=axes) for axes in (range(split, x.ndim), range(split))]
    return (to_bits(jnp.concatenate([key.reshape(-1) for key in keys])),)


def _cast_both(x: jax.Array, scale: jax.Array, *, fmt: Format, split: int) -> tuple[jax.Array, jax.Array]:
    data, turned = (cast_by_jnp(x, side, fmt=fmt) for side in _apart(scale, x.shape, split))
    # Transposed without a reshape to a matrix, because the partitioner may have sharded any of the dimensions.
    return data, lax.transpose(turned, (*range(split, x.ndim), *range(split)))


def _sizes(x: Any, split: int) -> tuple[int, int]:
    return math.prod(x.shape[:split]), math.prod(x.shape[split:])


_AMAX_BOTH = KernelOp(
    name="fp8_amax_both",
    reference=_keys_both,
    plan=lambda plans, x, *, split: plans.amax_both(*_sizes(x, split), str(x.dtype)),
    fits=lambda x, *, split: 0 < split < x.ndim,
)
_CAST_BOTH = KernelOp(
    name="fp8_cast_both",
    reference=_cast_both,
    plan=lambda plans, x, scale, *, fmt, split: plans.cast_both(*_sizes(x, split), str(x.dtype), fmt),
    fits=lambda x, scale, *, fmt, split: 0 < split < x.ndim and _sizes(x, split)[0] % 4 == 0,
)
