"""The functions of `fp8_common` on JAX arrays, bit for bit.

They work eagerly and under jit, vmap, grad and shard_map, with 64-bit types disabled and strict dtype promotion.
Everything has zero gradients except `fake_quantize`, which is straight-through. Formats, policies and errors come from
`fp8_common`. Needs jax >= 0.10.1.

Plugins also use the modules without an underscore: `arrays`, `casts` and `slices`.
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
