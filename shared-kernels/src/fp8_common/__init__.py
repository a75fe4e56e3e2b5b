"""FP8 formats, scales and quantization, defined in NumPy for every framework.

`fp8_common.torch` and `fp8_common.jax` hold the same functions on tensors and arrays, bit for bit equal.
Importing this package loads neither torch nor jax nor triton.
"""

from fp8_common._reference.activations import silu_mul, silu_mul_backward
from fp8_common._reference.gradient_messages import GradientCompression
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
from fp8_common.errors import Fp8Error, Fp8StaleError, Fp8UnsupportedError
from fp8_common.formats import DATA_FORMATS, E4M3, E4M3FNUZ, E5M2, E5M2FNUZ, E8M0, FORMATS, Format, get_format
from fp8_common.policy import CANONICAL, POWER_OF_2, ScalePolicy
from fp8_common.presets import PRESETS
from fp8_common.recipe import RECIPES, CastRecipe, Recipe, get_recipe
from fp8_common.rules import Decision, Rule, Rules, select_modules

__version__ = "0.1.0"

__all__ = [
    "CANONICAL",
    "DATA_FORMATS",
    "E4M3",
    "E4M3FNUZ",
    "E5M2",
    "E5M2FNUZ",
    "E8M0",
    "FORMATS",
    "POWER_OF_2",
    "PRESETS",
    "RECIPES",
    "CastRecipe",
    "Decision",
    "Format",
    "Fp8Error",
    "Fp8StaleError",
    "Fp8UnsupportedError",
    "GradientCompression",
    "Quantized",
    "Recipe",
    "Rule",
    "Rules",
    "ScalePolicy",
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
    "get_format",
    "get_recipe",
    "philox",
    "presets",
    "quantize",
    "quantize_blockwise",
    "quantize_mx",
    "quantize_rowwise",
    "quantize_stochastic",
    "random_bits",
    "reciprocal",
    "select_modules",
    "silu_mul",
    "silu_mul_backward",
    "update_history",
]
