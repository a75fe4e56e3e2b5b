"""Quantization that runs as one kernel on CUDA and as this package's jnp code everywhere else; the same bits.

The functions of `fp8_common.jax` come here by themselves where `FP8_COMMON_BACKEND` lets them and there is a GPU for
it; whoever calls these asks for the kernels, whatever machine traces. Formats, policies and modes are static.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from fp8_common._blocks import check_block
from fp8_common._formats import Format, get_data_format
from fp8_common._policy import CANONICAL, MxMode, ScalePolicy
from fp8_common._quantize import Quantized
from fp8_common.jax._amax import amax as _amax
from fp8_common.jax._arrays import float_key, from_bits
from fp8_common.jax._block_scaled import quantize_blockwise as _blockwise
from fp8_common.jax._block_scaled import quantize_mx as _mx
from fp8_common.jax._kernel_layout import WHOLE, Layout
from fp8_common.jax._kernel_ops import KernelOp, bindable
from fp8_common.jax._quantize import quantize as _quantize
from fp8_common.jax._quantize import quantize_rowwise as _rowwise
from fp8_common.jax._scaling import amax_to_scale

__all__ = [
    "amax",
    "quantize",
    "quantize_blockwise",
    "quantize_mx",
    "quantize_rowwise",
    "quantize_tensorwise",
    "quantize_transposed",
    "quantize_with_amax",
]


def amax(x: jax.Array) -> jax.Array:
    """Return max |x| over all elements as a float32 scalar; NaN wins, 0 if empty."""
    return from_bits(_amax_key(lax.stop_gradient(x))[0][0])


def quantize(x: jax.Array, scale: jax.Array, fmt: str | Format) -> jax.Array:
    """Return fp8(x * scale) for one float32 scale."""
    return _cast(_stop(x), _stop(scale).reshape(1), fmt=get_data_format(fmt))[0]


def quantize_with_amax(x: jax.Array, scale: jax.Array, fmt: str | Format) -> tuple[jax.Array, jax.Array]:
    """Return fp8(x * scale) for one float32 scale, and max |x| as a float32 scalar, from one read."""
    data, key = _cast_with_amax(_stop(x), _stop(scale).reshape(1), fmt=get_data_format(fmt))
    return data, from_bits(key[0])


def quantize_tensorwise(x: jax.Array, fmt: str | Format, policy: ScalePolicy = CANONICAL) -> Quantized:
    """Quantize with one scale from the array's own amax: two kernels, the scale is computed in the second."""
    x = _stop(x)
    data, scale = _cast_from_key(x, _amax_key(x)[0], fmt=get_data_format(fmt), policy=policy)
    return Quantized(data, scale[0])


def quantize_transposed(x: jax.Array, scale: jax.Array, fmt: str | Format) -> tuple[jax.Array, jax.Array]:
    """Return fp8(x * scale) and its transpose for a matrix and one scale, from one read."""
    data, transposed = _cast_transpose(_stop(x), _stop(scale).reshape(1), fmt=get_data_format(fmt))
    return data, transposed


def quantize_rowwise(x: jax.Array, fmt: str | Format, policy: ScalePolicy = CANONICAL) -> Quantized:
    """Quantize with one scale for each slice along the last axis; scales keep it with length 1."""
    return Quantized(*_rows(_stop(x), fmt=get_data_format(fmt), policy=policy))


def quantize_blockwise(
    x: jax.Array, fmt: str | Format, block: tuple[int, int] = (1, 128), policy: ScalePolicy = CANONICAL
) -> Quantized:
    """Quantize with one scale per block of the last two dimensions."""
    x, form, block = _stop(x), get_data_format(fmt), check_block(block, jnp.ndim(x))
    apply = _square_blocks if block == (128, 128) else _blocks_of_rows if block == (1, 128) else None
    if apply is None:
        return _blockwise(x, form, block, policy)
    return Quantized(*apply(x, fmt=form, block=block, policy=policy))


def quantize_mx(x: jax.Array, fmt: str | Format, mode: MxMode = "rceil") -> Quantized:
    """Quantize to OCP MX along the last axis: data and E8M0 scales."""
    data, codes = _mx_rows(_stop(x), fmt=get_data_format(fmt), mode=mode)
    return Quantized(data, lax.bitcast_convert_type(codes, jnp.float8_e8m0fnu))


def _stop(x: jax.Array) -> jax.Array:
    return lax.stop_gradient(jnp.asarray(x))


def _matrix(x: Any) -> tuple[int, int]:
    return math.prod(x.shape[:-1]), x.shape[-1]


def _dtype(x: Any) -> str:
    return str(x.dtype)


def _amax_key_reference(x: jax.Array) -> tuple[jax.Array]:
    return (float_key(_amax(x)).reshape(1),)


def _from_key_reference(x: jax.Array, key: jax.Array, *, fmt: Format, policy: ScalePolicy) -> tuple[jax.Array, ...]:
    scale = amax_to_scale(from_bits(key), fmt, policy)
    return _quantize(x, scale[0], fmt), scale


def _amax_key_over(
    call: Callable[..., Sequence[jax.Array]], x: jax.Array, *, axes: tuple[str, ...]
) -> tuple[jax.Array, ...]:
    """The key of an array whose shards are on the mesh axes `axes`."""
    # The kernel for each shard; keys are integers, so their MAX over devices is exact and keeps NaN.
    return (lax.pmax(call(x)[0], axes),)


def _cast_with_amax_over(
    call: Callable[..., Sequence[jax.Array]], x: jax.Array, scale: jax.Array, *, axes: tuple[str, ...], fmt: Format
) -> tuple[jax.Array, ...]:
    """The data of each shard, and the key of the array whose shards are on the mesh axes `axes`."""
    data, key = call(x, scale)
    return data, lax.pmax(key, axes)


def _rows_over(
    call: Callable[..., Sequence[jax.Array]], x: jax.Array, *, axes: tuple[str, ...], fmt: Format, policy: ScalePolicy
) -> tuple[jax.Array, ...]:
    """Rows whose parts are on the mesh axes `axes`: their amax is combined, the parts stay where they are."""
    # Reference code, because the row-wise kernel makes scale and data in one pass and cannot wait for other devices in
    # between.
    keys = lax.pmax(float_key(_amax(x, axis=-1, keepdims=True)), axes)
    scale = amax_to_scale(from_bits(keys), fmt, policy)
    return _quantize(x, scale, fmt), scale


def _transpose_reference(x: jax.Array, scale: jax.Array, *, fmt: Format) -> tuple[jax.Array, ...]:
    data = _quantize(x, scale[0], fmt)
    return data, data.T


def _mx_reference(x: jax.Array, *, fmt: Format, mode: MxMode) -> tuple[jax.Array, ...]:
    data, codes = _mx(x, fmt, mode)
    return data, lax.bitcast_convert_type(codes, jnp.uint8)


_amax_key = bindable(
    KernelOp(
        name="fp8_amax_key",
        reference=_amax_key_reference,
        plan=lambda plans, x: plans.amax(x.size, _dtype(x)),
        layout=Layout(steps=(WHOLE,), results=("amax",), combine=_amax_key_over),
    )
)
_cast = bindable(
    KernelOp(
        name="fp8_cast",
        reference=lambda x, scale, *, fmt: (_quantize(x, scale[0], fmt),),
        plan=lambda plans, x, scale, *, fmt: plans.cast(x.size, _dtype(x), fmt),
        layout=Layout(steps=(1,), results=("same",)),
    )
)
_cast_with_amax = bindable(
    KernelOp(
        name="fp8_cast_with_amax",
        reference=lambda x, scale, *, fmt: (_quantize(x, scale[0], fmt), *_amax_key_reference(x)),
        plan=lambda plans, x, scale, *, fmt: plans.cast(x.size, _dtype(x), fmt, with_amax=True),
        layout=Layout(steps=(WHOLE,), results=("same", "amax"), combine=_cast_with_amax_over),
    )
)
_cast_from_key = bindable(
    KernelOp(
        name="fp8_cast_from_key",
        reference=_from_key_reference,
        plan=lambda plans, x, key, *, fmt, policy: plans.cast(x.size, _dtype(x), fmt, policy=policy),
        layout=Layout(steps=(1,), results=("same", "scalar")),
    )
)
_cast_transpose = bindable(
    KernelOp(
        name="fp8_cast_transpose",
        reference=_transpose_reference,
        plan=lambda plans, x, scale, *, fmt: plans.cast_transpose(*x.shape, _dtype(x), fmt),
        layout=Layout(steps=(1, 1), results=("same", "transposed")),
    )
)
_rows = bindable(
    KernelOp(
        name="fp8_rowwise",
        reference=lambda x, *, fmt, policy: tuple(_rowwise(x, fmt, -1, policy)),
        plan=lambda plans, x, *, fmt, policy: plans.rowwise(*_matrix(x), _dtype(x), fmt, policy, inverse=False),
        layout=Layout(steps=(WHOLE,), results=("same", "row"), combine=_rows_over),
    )
)


def _block_plan(plans: Any, x: Any, *, fmt: Format, block: tuple[int, int], policy: ScalePolicy) -> Any:
    if block != (1, 128) and len(x.shape) != 2:
        return None
    return plans.blockwise(*_matrix(x), _dtype(x), fmt, block[0], policy, inverse=False)


def _block_reference(
    x: jax.Array, *, fmt: Format, block: tuple[int, int], policy: ScalePolicy
) -> tuple[jax.Array, ...]:
    return tuple(_blockwise(x, fmt, block, policy))


_blocks_of_rows = bindable(
    KernelOp(
        name="fp8_block_rows",
        reference=_block_reference,
        plan=_block_plan,
        layout=Layout(steps=(128,), results=("same", "groups")),
    )
)
_square_blocks = bindable(
    KernelOp(
        name="fp8_blocks",
        reference=_block_reference,
        plan=_block_plan,
        layout=Layout(steps=(128, 128), results=("same", "groups")),
    )
)
_mx_rows = bindable(
    KernelOp(
        name="fp8_mx",
        reference=_mx_reference,
        plan=lambda plans, x, *, fmt, mode: plans.mx(*_matrix(x), _dtype(x), fmt, mode),
        layout=Layout(steps=(32,), results=("same", "groups")),
    )
)
