"""E8M0 scales of MX blocks: the integer operations of `fp8_common._e8m0` on int32."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from fp8_common._amax import INF_KEY
from fp8_common._e8m0 import check_mode
from fp8_common._formats import E8M0, Format, get_data_format
from fp8_common._policy import MxMode
from fp8_common.jax._arrays import MANTISSA_MASK, NAN_KEY, as_codes, as_float32, float_key, from_bits
from fp8_common.jax._rounding import decode


def amax_to_e8m0(amax: ArrayLike, fmt: str | Format, mode: MxMode = "rceil") -> jax.Array:
    """Return the biased exponent of the block scale that goes back from FP8.

    The gradient is zero.

    Args:
        amax: float16, bfloat16 or float32, any shape: max |x| of each block.
        fmt: The element format of the block; static under jit.
        mode: "floor", "ceil", "even" or "rceil", as in `fp8_common.amax_to_e8m0`; static under jit.

    Returns:
        uint8 codes of the shape of `amax`; 255 (NaN) where amax is infinite or NaN.

    Raises:
        Fp8Error: Unknown mode or format, or unsupported dtype.
    """
    fmt = get_data_format(fmt)
    check_mode(mode)
    key = float_key(lax.stop_gradient(as_float32(amax, "amax")))
    # Both are negative for subnormals, as for all that is too small: the smallest scale holds them.
    code = _rceil(key, fmt) if mode == "rceil" else _round_exponent(key, fmt, mode) - fmt.max_exponent
    return jnp.where(key >= INF_KEY, E8M0.nan_code, jnp.maximum(code, 0)).astype(jnp.uint8)


def e8m0_to_scale(codes: ArrayLike) -> jax.Array:
    """Return the float32 multiplier into FP8, 2^(127-code); NaN for 255. Code 254 is subnormal.

    Args:
        codes: uint8 or float8_e8m0fnu, any shape.
    """
    code = lax.stop_gradient(as_codes(codes, E8M0)).astype(jnp.int32)
    # The reciprocal of 2^k is 2^-k: its exponent field is 254 - code. 1 << 22 are the bits of 2^-127, which is
    # subnormal.
    bits = jnp.where(code == 254, jnp.int32(1 << 22), (254 - code) << 23)
    return from_bits(jnp.where(code == E8M0.nan_code, jnp.int32(NAN_KEY), bits))


def e8m0_to_scale_inv(codes: ArrayLike) -> jax.Array:
    """Return the float32 multiplier back from FP8, 2^(code-127); NaN for 255. Code 0 is subnormal.

    Args:
        codes: uint8 or float8_e8m0fnu, any shape.
    """
    return decode(codes, E8M0)


def _round_exponent(key: jax.Array, fmt: Format, mode: MxMode) -> jax.Array:
    if mode == "even":
        # May overflow for a NaN only, which is decided on the key as it was.
        key = key + jnp.int32(1 << (22 - fmt.mantissa_bits))
    if mode == "ceil":
        return (key >> 23) + ((key & MANTISSA_MASK) != 0).astype(jnp.int32)
    return key >> 23


def _rceil(key: jax.Array, fmt: Format) -> jax.Array:
    """Compare mantissas instead of dividing: amax <= fmt.max * 2^k when its mantissa is not the larger."""
    limit = int(np.float32(fmt.max).view(np.int32))
    above = ((key & MANTISSA_MASK) > (limit & MANTISSA_MASK)).astype(jnp.int32)
    return (key >> 23) - ((limit >> 23) - 127) + above
