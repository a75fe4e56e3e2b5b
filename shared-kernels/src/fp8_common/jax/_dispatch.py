"""The functions of `fp8_common.jax` that have kernels: operations with kernels on a GPU, jnp code elsewhere.

The choice is made while a function is traced. Both give the same bits; the jnp code compiles for any device. Division,
which chooses when it is lowered, and scales of amax given by its bits are here for plugins.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from fp8_common._blocks import Block, check_block
from fp8_common._formats import Format, get_data_format
from fp8_common._policy import CANONICAL, MxMode, ScalePolicy
from fp8_common._quantize import Quantized
from fp8_common.jax import _amax as amax_reference
from fp8_common.jax import _block_scaled as block_references
from fp8_common.jax import _kernels as kernels
from fp8_common.jax import _quantize as references
from fp8_common.jax._arrays import as_float32, broadcast_scale
from fp8_common.jax._division import divide_nearest
from fp8_common.jax._scaling import amax_to_scale, key_to_scale
from fp8_common.jax._triton_bridge import selects_kernels

__all__ = [
    "amax",
    "divide_nearest",
    "key_to_scale",
    "quantize",
    "quantize_blockwise",
    "quantize_mx",
    "quantize_rowwise",
    "quantize_slices_to_codes",
    "quantize_to_codes",
    "quantize_to_codes_with_amax",
]

BLOCKS_WITH_KERNELS = ((1, 128), (128, 128))


def amax(x: ArrayLike, axis: int | Sequence[int] | None = None, keepdims: bool = False) -> jax.Array:
    """Return max |x| over `axis` as float32, exactly; subnormals count although XLA flushes them.

    The gradient is zero. Across devices, combine amax by `jax.lax.pmax` of its bits.

    Args:
        x: float16, bfloat16 or float32, any shape.
        axis: Axis or axes to reduce; None reduces all. Static under jit.
        keepdims: Keep reduced axes with length 1. Static under jit.

    Returns:
        float32; 0 for an empty reduction, NaN if any reduced element is NaN, else inf if any is infinite.

    Raises:
        Fp8Error: `x` has another dtype.
    """
    # The kernel reduces a whole array of at least one dimension.
    if axis is not None or not np.ndim(x) or not selects_kernels():
        return amax_reference.amax(x, axis, keepdims)
    as_float32(x)
    largest = kernels.amax(jnp.asarray(x))
    return largest.reshape((1,) * np.ndim(x)) if keepdims else largest


def quantize(x: ArrayLike, scale: ArrayLike, fmt: str | Format) -> jax.Array:
    """Return `x * scale` in the native dtype of `fmt`, saturating; infinity becomes NaN.

    Args:
        x: float16, bfloat16 or float32, any shape.
        scale: float32, broadcastable to `x`.
        fmt: The FP8 format; static under jit.

    Returns:
        float8 array of the shape of `x`.

    Raises:
        Fp8Error: Unsupported dtype or format, or `scale` does not broadcast.
    """
    # One scale for the whole array has a kernel.
    if np.size(scale) != 1 or not np.ndim(x) or not selects_kernels():
        return references.quantize(x, scale, fmt)
    return kernels.quantize(jnp.asarray(x), broadcast_scale(scale, as_float32(x).shape), get_data_format(fmt))


def quantize_to_codes(x: jax.Array, scale: jax.Array, fmt: Format) -> jax.Array:
    """Return the uint8 codes of `x * scale`, as `quantize` does for scales that canonical policies make.

    Args:
        x: float16, bfloat16 or float32, any shape.
        scale: float32 in [2^-126, 2^100], broadcastable to `x`.
        fmt: The FP8 format; static under jit.

    Returns:
        uint8 of the shape of `x`.
    """
    if scale.size != 1 or not x.ndim or not selects_kernels():
        return references.quantize_to_codes(x, scale, fmt)
    return lax.bitcast_convert_type(kernels.quantize(x, scale, fmt), jnp.uint8)


def quantize_to_codes_with_amax(x: jax.Array, scale: jax.Array, fmt: Format) -> tuple[jax.Array, jax.Array]:
    """Return `quantize_to_codes(x, scale, fmt)` for a scale of one element, and `amax(x)`; a kernel reads `x` once."""
    if not x.ndim or not selects_kernels():
        return references.quantize_to_codes(x, scale, fmt), amax_reference.amax(x)
    data, largest = kernels.quantize_with_amax(x, scale, fmt)
    return lax.bitcast_convert_type(data, jnp.uint8), largest


def quantize_slices_to_codes(
    x: jax.Array, fmt: Format, axes: tuple[int, ...], policy: ScalePolicy
) -> tuple[jax.Array, jax.Array]:
    """Return uint8 codes of the shape of `x`, and float32 scales, one for each slice along `axes`, of length 1 there.

    The same bits as `quantize_to_codes` with the scales of `amax_to_scale`; static arguments as there.
    """
    # The kernel reads rows. XLA's products want their summed dimension last, so the transpose is needed anyhow.
    if len(axes) == 1 and x.ndim > 1 and selects_kernels():
        rows = jnp.moveaxis(x, axes[0], -1)
        data, scale = (jnp.moveaxis(result, -1, axes[0]) for result in kernels.quantize_rowwise(rows, fmt, policy))
        return lax.bitcast_convert_type(data, jnp.uint8), scale
    scale = amax_to_scale(amax_reference.amax(x, axis=axes, keepdims=True), fmt, policy)
    return references.quantize_to_codes(x, scale, fmt), scale


def quantize_rowwise(x: ArrayLike, fmt: str | Format, axis: int = -1, policy: ScalePolicy = CANONICAL) -> Quantized:
    """Quantize with one scale for each slice along `axis`.

    Args:
        x: float16, bfloat16 or float32, any shape of at least one dimension.
        fmt: The FP8 format.
        axis: The axis that shares a scale: -1 gives a scale per row, 0 a scale per column of a matrix.
        policy: The scale rule.

    Returns:
        float8 data of the shape of `x`; float32 scales of that shape with `axis` of length 1.

    Raises:
        Fp8Error: Unsupported dtype or format.
    """
    # The kernel reads rows, so the axis that shares a scale must be the last; max(1, ...) leaves scalars to the
    # reference, which raises.
    if axis % max(1, np.ndim(x)) != np.ndim(x) - 1 or not selects_kernels():
        return references.quantize_rowwise(x, fmt, axis, policy)
    as_float32(x)
    return kernels.quantize_rowwise(jnp.asarray(x), fmt, policy)


def quantize_blockwise(
    x: ArrayLike, fmt: str | Format, block: Block = (1, 128), policy: ScalePolicy = CANONICAL
) -> Quantized:
    """Quantize with one scale for each (rows, columns) block of the last two dimensions.

    Args:
        x: float16, bfloat16 or float32 [..., M, N]; blocks at the edges may be partial.
        fmt: The FP8 format.
        block: (1, 128) for activations and gradients, (128, 128) for weights.
        policy: The scale rule.

    Returns:
        float8 data [..., M, N]; float32 scales [..., ceil(M / rows), ceil(N / columns)].

    Raises:
        Fp8Error: Unsupported dtype, format or block.
    """
    if check_block(block, np.ndim(x)) not in BLOCKS_WITH_KERNELS or not selects_kernels():
        return block_references.quantize_blockwise(x, fmt, block, policy)
    as_float32(x)
    return kernels.quantize_blockwise(jnp.asarray(x), fmt, block, policy)


def quantize_mx(x: ArrayLike, fmt: str | Format, mode: MxMode = "rceil") -> Quantized:
    """Quantize to OCP MX: one E8M0 scale for 32 consecutive values of the last dimension.

    Args:
        x: float16, bfloat16 or float32 [..., N]; the last block may be partial.
        fmt: The element format.
        mode: How the scale is rounded; see `amax_to_e8m0`.

    Returns:
        float8 data [..., N]; float8_e8m0fnu scales [..., ceil(N / 32)], which go back from FP8; a NaN scale
        marks a block with an infinity or a NaN, all of whose data is NaN.

    Raises:
        Fp8Error: Unsupported dtype, format or mode.
    """
    if not selects_kernels():
        return block_references.quantize_mx(x, fmt, mode)
    as_float32(x)
    return kernels.quantize_mx(jnp.asarray(x), fmt, mode)
