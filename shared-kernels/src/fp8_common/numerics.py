"""NumPy functions that define the values of all frameworks.

`fp8_common.torch` and `fp8_common.jax` have most of them, equal bit for bit. They do not export `philox`,
`random_bits`, `silu_mul` and `silu_mul_backward`.
"""

from fp8_common._reference.activations import silu_mul, silu_mul_backward
from fp8_common._reference.quantize import (
    Quantized,
    dequantize,
    dequantize_blockwise,
    dequantize_mx,
    quantize,
    quantize_blockwise,
    quantize_mx,
    quantize_rowwise,
    quantize_stochastic,
)
from fp8_common._reference.rounding import decode, encode, encode_stochastic, philox, random_bits
from fp8_common._reference.scaling import (
    amax,
    amax_to_e8m0,
    amax_to_scale,
    amax_to_scale_inv,
    e8m0_to_scale,
    e8m0_to_scale_inv,
    reciprocal,
    update_history,
)

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
    "philox",
    "quantize",
    "quantize_blockwise",
    "quantize_mx",
    "quantize_rowwise",
    "quantize_stochastic",
    "random_bits",
    "reciprocal",
    "silu_mul",
    "silu_mul_backward",
    "update_history",
]
