"""Casts with tensor scales, to FP8 and back: jnp code and kernels.

Data have the native dtype of the format (`jnp.float8_e4m3fn`, ...). All gradients are zero, except that of
`fake_quantize`. Formats, policies and dtypes are static under jit. `cast`, `cast_with_amax`, `cast_transpose`,
`cast_transpose_with_amax`, `amax_of` and `multiply_back` are for plugins.
"""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from fp8_common._reference.scaling import INF_KEY, INPUT_DTYPES
from fp8_common.errors import Fp8Error
from fp8_common.formats import Format, get_data_format
from fp8_common.jax._kernels import KernelOp
from fp8_common.jax._kernels import selects_kernels as selects_kernels
from fp8_common.jax._kernels import traced_capability as traced_capability
from fp8_common.jax._rounding import (
    check_random_bits,
    decode_codes,
    nan_where_infinite,
    round_to_codes,
    round_to_codes_at_random,
    round_to_native,
)
from fp8_common.jax._scales import reciprocal
from fp8_common.jax.numerics import (
    as_float32,
    as_input,
    as_native,
    broadcast_scale,
    float_key,
    from_bits,
    product_back,
    product_into,
    to_bits,
    to_uint8_codes,
)

FOLDS = 8
"""Number of rows that `_folded` reduces at once."""
FOLD_FROM_BYTES = 1 << 16
"""Size from which folding is faster in spite of its longer compilation."""

# ---------------------------------------------------------------- amax


def amax(x: ArrayLike, axis: int | Sequence[int] | None = None, keepdims: bool = False) -> jax.Array:
    """Return max |x| over axes as float32, exactly.

    Subnormals count, although XLA flushes them. The gradient is zero. Across devices, combine amax by `jax.lax.pmax` of
    their bits.

    Args:
        x: float16, bfloat16 or float32, any shape.
        axis: Axis or axes to reduce; None reduces all. Static under jit.
        keepdims: Whether to keep reduced axes with length 1. Static under jit.

    Returns:
        float32; 0 for an empty reduction, NaN if any reduced element is NaN, else infinity if any is infinite.

    Raises:
        Fp8Error: If the dtype of `x` is not supported.
    """
    if axis is not None:
        return amax_by_jnp(x, axis, keepdims)
    as_float32(x)
    largest = from_bits(_AMAX_KEY(x, rounded=False)[0][0])
    return largest.reshape((1,) * np.ndim(x)) if keepdims else largest


def amax_of(x: jax.Array, rounded: bool) -> jax.Array:
    """Return `amax(x)`; with `rounded`, of float32 `x` rounded to bfloat16."""
    return from_bits(_AMAX_KEY(x, rounded=rounded)[0][0])


def _read(x: jax.Array, rounded: bool) -> jax.Array:
    # Two conversions would be removed by XLA.
    return lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7) if rounded else x


def _key_of_amax(x: jax.Array, *, rounded: bool) -> tuple[jax.Array]:
    return (to_bits(amax_by_jnp(_read(x, rounded))).reshape(1),)


_AMAX_KEY = KernelOp(
    name="fp8_amax_key",
    reference=_key_of_amax,
    plan=lambda plans, x, *, rounded: plans.amax(x.size, str(x.dtype), rounded=rounded),
    # The kernel reduces a whole array of at least one dimension.
    fits=lambda x, *, rounded: x.ndim > 0,
)


def amax_by_jnp(x: ArrayLike, axis: int | Sequence[int] | None = None, keepdims: bool = False) -> jax.Array:
    """Return `amax` by jnp code, an integer maximum over bits.

    Arguments are those of `amax`.
    """
    return _amax(as_input(x), axis=tuple(axis) if isinstance(axis, Sequence) else axis, keepdims=keepdims)


@partial(jax.jit, static_argnames=("axis", "keepdims"), inline=True)
def _amax(x: jax.Array, *, axis: int | tuple[int, ...] | None, keepdims: bool) -> jax.Array:
    width = np.dtype(f"int{8 * x.dtype.itemsize}")
    # The bits of |x| have the order of |x|, with NaN last.
    keys = lax.bitwise_and(lax.bitcast_convert_type(lax.stop_gradient(x), width), width.type(np.iinfo(width).max))
    # Keys of 16 bits are compared as float32, which represents them: XLA on CPUs compiles this faster. There are
    # collectives for int32 and float32, but not for int16.
    kind = np.dtype(np.int32 if width.itemsize == 4 else np.float32)
    plain = lambda keys: jnp.max(keys.astype(kind), axis=axis, keepdims=keepdims, initial=0).astype(jnp.int32)  # noqa: E731
    # The platform is selected at lowering, because the program may be traced on a machine with another processor.
    folds = axis is None and _folds(x)
    key = lax.platform_dependent(keys, cpu=lambda keys: plain(_folded(keys)), default=plain) if folds else plain(keys)
    if x.dtype == jnp.float16:
        return lax.bitcast_convert_type(key.astype(jnp.int16), x.dtype).astype(jnp.float32)
    # By bits, because a conversion of bfloat16 may flush subnormals.
    return from_bits(lax.shift_left(key, np.int32(32 - 8 * x.dtype.itemsize)))


def _folds(x: jax.Array) -> bool:
    """Return whether an array can and should be reduced by `_folded`.

    It must be large, its size divisible by `FOLDS` rows, its dimensions known, and its type not sharded.
    """
    known = all(isinstance(n, int) for n in x.shape) and not any(jax.typeof(x).sharding.spec)
    return known and x.size * x.dtype.itemsize >= FOLD_FROM_BYTES and x.size % (FOLDS * x.shape[-1]) == 0


def _folded(keys: jax.Array) -> jax.Array:
    """Reduce groups of `FOLDS` rows elementwise.

    On CPUs, XLA reduces elements of different rows several times faster than elements of the same row.
    """
    # The barrier prevents XLA from merging this reduction with the next one. Arrays that are sharded over devices are
    # excluded by `_folds`, because the reshape would move their data.
    rows = keys.reshape(-1, *[1] * (keys.ndim - 2), FOLDS, keys.shape[-1])
    return lax.optimization_barrier(jnp.max(rows, axis=-2))


# ---------------------------------------------------------------- one scale, or one that broadcasts


def quantize(x: ArrayLike, scale: ArrayLike, fmt: str | Format) -> jax.Array:
    """Return `x * scale`, rounded to nearest even, in the format's dtype.

    Large finite magnitudes saturate; infinity and NaN become NaN.

    Args:
        x: float16, bfloat16 or float32, any shape.
        scale: float32, broadcastable to `x`.
        fmt: FP8 format; static under jit.

    Returns:
        float8 array of the shape of `x`.

    Raises:
        Fp8Error: If the dtype or format is not supported, or `scale` does not broadcast.
    """
    shape = as_float32(x).shape
    return _QUANTIZE(x, broadcast_scale(scale, shape), fmt=get_data_format(fmt))[0]


def cast(x: jax.Array, scale: jax.Array, fmt: Format, rounded: bool = False) -> jax.Array:
    """Return `quantize` for scales in [2^-126, 2^100], with fewer operations.

    Args:
        x: float16, bfloat16 or float32, any shape.
        scale: float32 in [2^-126, 2^100], broadcastable to `x`.
        fmt: FP8 format; static under jit.
        rounded: Whether to round float32 `x` to bfloat16 first, without a copy in kernels; static under jit.

    Returns:
        float8 array of the shape of `x`.
    """
    return _CAST(x, scale, fmt=fmt, rounded=rounded)[0]


def cast_with_amax(x: jax.Array, scale: jax.Array, fmt: Format, rounded: bool = False) -> tuple[jax.Array, jax.Array]:
    """Return `cast` for a single scale, and `amax_of(x, rounded)`.

    A kernel reads `x` once. Arguments are those of `cast`.
    """
    data, key = _CAST_WITH_AMAX(x, scale, fmt=fmt, rounded=rounded)
    return data, from_bits(key[0])


def cast_transpose(
    x: jax.Array, scale: jax.Array, fmt: Format, split: int, rounded: bool = False
) -> tuple[jax.Array, ...]:
    """Return `cast` for a single scale, and its transpose.

    A kernel reads `x` once.

    Args:
        x: float16, bfloat16 or float32, at least two dimensions.
        scale: float32 in [2^-126, 2^100], one element.
        fmt: FP8 format; static under jit.
        split: Number of leading dimensions that the transpose moves to the end; static under jit.
        rounded: Whether to round float32 `x` to bfloat16 first; static under jit.
    """
    return tuple(_CAST_TRANSPOSE(x, scale, fmt=fmt, split=split, rounded=rounded))


def cast_transpose_with_amax(
    x: jax.Array, scale: jax.Array, fmt: Format, split: int, rounded: bool = False
) -> tuple[jax.Array, ...]:
    """Return the results of `cast_transpose`, and `amax_of(x, rounded)`.

    A kernel reads `x` once.
    """
    *both, key = _CAST_TRANSPOSE_WITH_AMAX(x, scale, fmt=fmt, split=split, rounded=rounded)
    return *both, from_bits(key[0])


# Jitted, so that an eager call is compiled as a whole. Inlined, so that traced programs contain no call.
@partial(jax.jit, static_argnames="fmt", inline=True)
def quantize_by_jnp(x: jax.Array, scale: jax.Array, *, fmt: Format) -> jax.Array:
    """Return `quantize` by jnp code, for any scales and validated arguments."""
    scaled = product_into(nan_where_infinite(x.astype(jnp.float32)), scale)
    return as_native(round_to_codes(scaled, fmt), fmt)


@partial(jax.jit, static_argnames="fmt", inline=True)
def cast_by_jnp(x: jax.Array, scale: jax.Array, *, fmt: Format) -> jax.Array:
    """Return `cast` by jnp code."""
    # With scales in this range, subnormals round to zero in all formats, so XLA may flush them.
    value = x.astype(jnp.float32)
    return round_to_native(value * scale, fmt, lax.ge(float_key(value), np.int32(INF_KEY)))


def _has_one_scale(x: Any, scale: Any, **params: Any) -> bool:
    return scale.size == 1 and x.ndim > 0


def _cast_read(x: jax.Array, scale: jax.Array, *, fmt: Format, rounded: bool) -> tuple[jax.Array]:
    return (cast_by_jnp(_read(x, rounded), scale, fmt=fmt),)


_QUANTIZE = KernelOp(
    name="fp8_quantize",
    reference=lambda x, scale, *, fmt: (quantize_by_jnp(x, scale, fmt=fmt),),
    plan=lambda plans, x, scale, *, fmt: plans.cast(x.size, str(x.dtype), fmt),
    fits=_has_one_scale,
)
_CAST = KernelOp(
    name="fp8_cast",
    reference=_cast_read,
    plan=lambda plans, x, scale, *, fmt, rounded: plans.cast(x.size, str(x.dtype), fmt, rounded=rounded),
    fits=_has_one_scale,
)
_OF_CAST = _CAST, 2, ("fmt", "rounded")
_OF_AMAX = _AMAX_KEY, 1, ("rounded",)
_CAST_WITH_AMAX = KernelOp(
    name="fp8_cast_with_amax",
    reference=lambda x, scale, *, fmt, rounded: (
        *_cast_read(x, scale, fmt=fmt, rounded=rounded),
        *_key_of_amax(x, rounded=rounded),
    ),
    plan=lambda plans, x, scale, *, fmt, rounded: plans.cast(
        x.size, str(x.dtype), fmt, with_amax=True, rounded=rounded
    ),
    fits=_has_one_scale,
    smaller={(True, False): _OF_CAST, (False, True): _OF_AMAX},
)


def _transposed_too(
    x: jax.Array, scale: jax.Array, *, fmt: Format, split: int, rounded: bool
) -> tuple[jax.Array, jax.Array]:
    (data,) = _cast_read(x, scale, fmt=fmt, rounded=rounded)
    # Transposed without a reshape to a matrix, because the partitioner may have sharded any of the dimensions.
    return data, lax.transpose(data, (*range(split, x.ndim), *range(split)))


def _plan_of_transpose(
    plans: Any, x: Any, scale: Any, *, fmt: Format, split: int, rounded: bool, with_amax: bool = False
) -> Any:
    sizes = math.prod(x.shape[:split]), math.prod(x.shape[split:])
    return plans.cast_transpose(*sizes, str(x.dtype), fmt, with_amax=with_amax, rounded=rounded)


_CAST_TRANSPOSE = KernelOp(
    name="fp8_cast_transpose",
    reference=_transposed_too,
    plan=_plan_of_transpose,
    fits=lambda x, scale, *, split, **_: scale.size == 1 and 0 < split < x.ndim,
    smaller={(True, False): _OF_CAST},
)
_CAST_TRANSPOSE_WITH_AMAX = KernelOp(
    name="fp8_cast_transpose_with_amax",
    reference=lambda x, scale, *, rounded, **params: (
        *_transposed_too(x, scale, rounded=rounded, **params),
        *_key_of_amax(x, rounded=rounded),
    ),
    plan=partial(_plan_of_transpose, with_amax=True),
    fits=_CAST_TRANSPOSE.fits,
    smaller={
        (True, True, False): (_CAST_TRANSPOSE, 2, ("fmt", "split", "rounded")),
        (True, False, True): (_CAST_WITH_AMAX, 2, ("fmt", "rounded")),
        (True, False, False): _OF_CAST,
        (False, False, True): _OF_AMAX,
    },
)


def quantize_stochastic(x: ArrayLike, scale: ArrayLike, fmt: str | Format, random_bits: ArrayLike) -> jax.Array:
    """Quantize with stochastic rounding; see `encode_stochastic`.

    Args:
        x: float16, bfloat16 or float32, any shape.
        scale: float32, broadcastable to `x`.
        fmt: FP8 format; static under jit.
        random_bits: uint32 of the shape of `x`, for example `jax.random.bits(key, x.shape)`.

    Returns:
        float8 array of the shape of `x`.

    Raises:
        Fp8Error: If the dtype, format or shape is not supported.
    """
    value = as_float32(x)
    bits = check_random_bits(random_bits, value.shape)
    return _quantize_stochastic(value, broadcast_scale(scale, value.shape), bits, fmt=get_data_format(fmt))


@partial(jax.jit, static_argnames="fmt", inline=True)
def _quantize_stochastic(x: jax.Array, scale: jax.Array, bits: jax.Array, *, fmt: Format) -> jax.Array:
    scaled = product_into(nan_where_infinite(lax.stop_gradient(x)), lax.stop_gradient(scale))
    return as_native(round_to_codes_at_random(scaled, bits, fmt), fmt)


def dequantize(q: ArrayLike, scale: ArrayLike, fmt: str | Format, dtype: DTypeLike = jnp.float32) -> jax.Array:
    """Return `q * RN32(1 / scale)`, computed in float32 and rounded to `dtype`.

    Args:
        q: float8 data or uint8 codes, any shape.
        scale: float32 scale into FP8, broadcastable to `q`.
        fmt: FP8 format of `q`; static under jit.
        dtype: float32, float16 or bfloat16; static under jit.

    Raises:
        Fp8Error: If the dtype or format is not supported, or `scale` does not broadcast.
    """
    fmt = get_data_format(fmt)
    codes = to_uint8_codes(q, fmt)
    return multiply_back(codes, reciprocal(broadcast_scale(scale, codes.shape)), fmt, dtype)


def multiply_back(codes: jax.Array, scale_inv: jax.Array, fmt: Format, dtype: DTypeLike) -> jax.Array:
    """Return the values of uint8 codes times float32 `scale_inv`, in `dtype`.

    Both have the same number of dimensions, and `scale_inv` broadcasts.

    Raises:
        Fp8Error: If `dtype` is not float32, float16 or bfloat16.
    """
    target = np.dtype(dtype)
    if target not in INPUT_DTYPES:
        raise Fp8Error(f"dtype must be float16, bfloat16 or float32, got {target}.")
    return _multiply_back(codes, scale_inv, fmt=fmt, dtype=target)


@partial(jax.jit, static_argnames=("fmt", "dtype"), inline=True)
def _multiply_back(codes: jax.Array, scale_inv: jax.Array, *, fmt: Format, dtype: np.dtype) -> jax.Array:
    return product_back(decode_codes(codes, fmt), lax.stop_gradient(scale_inv)).astype(dtype)


def fake_quantize(x: ArrayLike, scale: ArrayLike, fmt: str | Format) -> jax.Array:
    """Quantize and dequantize, with a straight-through gradient.

    In forward mode, the tangent of `x` is passed through unchanged, and the tangent of `scale` is ignored. In reverse
    mode, `x` gets the cotangent of the result, also where it saturates, and `scale` gets zero. Second derivatives are
    zero.

    Args:
        x: float16, bfloat16 or float32, any shape.
        scale: float32, broadcastable to `x`.
        fmt: FP8 format; static under jit.

    Returns:
        `dequantize(quantize(x, scale, fmt), scale, fmt, x.dtype)`, of the shape and dtype of `x`.

    Raises:
        Fp8Error: If the dtype or format is not supported, or `scale` does not broadcast.
    """
    as_float32(x)
    as_float32(scale, "scale")
    return _fake_quantize(x, scale, get_data_format(fmt))


# A JVP, which JAX transposes for reverse mode. With a VJP, forward mode would not work.
@partial(jax.custom_jvp, nondiff_argnums=(2,))
def _fake_quantize(x: jax.Array, scale: jax.Array, fmt: Format) -> jax.Array:
    return dequantize(quantize(x, scale, fmt), scale, fmt, x.dtype)


@_fake_quantize.defjvp
def _straight_through(
    fmt: Format, primals: tuple[jax.Array, jax.Array], tangents: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    return _fake_quantize(*primals, fmt), tangents[0]
