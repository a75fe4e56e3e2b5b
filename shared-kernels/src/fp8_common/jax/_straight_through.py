"""`fake_quantize`: a cast to FP8 and back whose gradient is the identity, the convention of quantized training."""

from functools import partial

import jax
from jax.typing import ArrayLike

from fp8_common._formats import Format, get_data_format
from fp8_common.jax._arrays import as_float32
from fp8_common.jax._dispatch import quantize
from fp8_common.jax._quantize import dequantize


def fake_quantize(x: ArrayLike, scale: ArrayLike, fmt: str | Format) -> jax.Array:
    """Return `x` as its FP8 codes represent it: `dequantize(quantize(x, scale, fmt), scale, fmt, x.dtype)`.

    Forward mode: the tangent of `x` passes unchanged, the tangent of `scale` is dropped. Transposed: the
    cotangent of the result is the cotangent of `x`, also where `x` saturates; `scale` gets zero. Second
    derivatives are zero.

    Args:
        x: float16, bfloat16 or float32, any shape.
        scale: float32, broadcastable to `x`.
        fmt: The FP8 format; static under jit.

    Returns:
        Array of the shape and dtype of `x`.

    Raises:
        Fp8Error: Unsupported dtype or format, or `scale` does not broadcast.
    """
    as_float32(x)
    as_float32(scale, "scale")
    return _fake_quantize(x, scale, get_data_format(fmt))


# A JVP and not a VJP: JAX transposes it for reverse mode, and forward mode works as well.
@partial(jax.custom_jvp, nondiff_argnums=(2,))
def _fake_quantize(x: jax.Array, scale: jax.Array, fmt: Format) -> jax.Array:
    return dequantize(quantize(x, scale, fmt), scale, fmt, x.dtype)


@_fake_quantize.defjvp
def _straight_through(
    fmt: Format, primals: tuple[jax.Array, jax.Array], tangents: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    return _fake_quantize(*primals, fmt), tangents[0]
