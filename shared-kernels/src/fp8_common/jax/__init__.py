"""FP8 quantization on JAX arrays: the functions of `fp8_common`, bit for bit.

They work eagerly and under jit, vmap, grad and shard_map, with 64-bit types disabled and with strict dtype promotion.
All gradients are zero except that of `fake_quantize`, which is straight-through. Formats, policies and errors are those
of `fp8_common`. Requires jax >= 0.10.1.

Plugins may also use the modules without an underscore: `casts`, `certify`, `compat`, `numerics` and `slices`.
"""

from fp8_common.plugin import extra

with extra("fp8-common[jax]", __name__):
    import jax  # noqa: F401

from fp8_common._reference.quantize import Quantized
from fp8_common.jax._blocks import dequantize_blockwise, dequantize_mx, quantize_blockwise, quantize_mx
from fp8_common.jax._rounding import decode, encode, encode_stochastic
from fp8_common.jax._scales import (
    amax_to_e8m0,
    amax_to_scale,
    amax_to_scale_inv,
    e8m0_to_scale,
    e8m0_to_scale_inv,
    reciprocal,
    update_history,
)
from fp8_common.jax.casts import (
    amax,
    dequantize,
    fake_quantize,
    quantize,
    quantize_stochastic,
)
from fp8_common.jax.slices import quantize_rowwise

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
