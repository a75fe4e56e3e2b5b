"""The functions of `fp8_common` on JAX arrays, bit for bit equal to the NumPy definition.

They work eagerly and under jit, vmap, grad and shard_map, with 64-bit types disabled and strict dtype
promotion. Everything has zero gradients except `fake_quantize`, which is straight-through. Formats, policies
and errors are those of `fp8_common`. Needs jax >= 0.10.
"""

try:
    import jax  # noqa: F401
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"fp8_common.jax needs {error.name}, which is not installed. Run: pip install 'fp8-common[jax]'",
        name=error.name,
    ) from None

from fp8_common._quantize import Quantized
from fp8_common.jax._block_scaled import dequantize_blockwise, dequantize_mx
from fp8_common.jax._dispatch import amax, quantize, quantize_blockwise, quantize_mx, quantize_rowwise
from fp8_common.jax._e8m0 import amax_to_e8m0, e8m0_to_scale, e8m0_to_scale_inv
from fp8_common.jax._history import update_history
from fp8_common.jax._quantize import dequantize, quantize_stochastic
from fp8_common.jax._rounding import decode, encode, encode_stochastic
from fp8_common.jax._scaling import amax_to_scale, amax_to_scale_inv, reciprocal
from fp8_common.jax._straight_through import fake_quantize

__all__ = [
    "Quantized",
    "amax",
    "amax_to_e8m0",
    "amax_to_scale",
    "amax_to_scale_inv",
    "decode",
    "dequantize",
    "dequantize_blockwise",
    "dequantize_mx",
    "e8m0_to_scale",
    "e8m0_to_scale_inv",
    "encode",
    "encode_stochastic",
    "fake_quantize",
    "quantize",
    "quantize_blockwise",
    "quantize_mx",
    "quantize_rowwise",
    "quantize_stochastic",
    "reciprocal",
    "update_history",
]
