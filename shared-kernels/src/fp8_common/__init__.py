"""FP8 formats, scales and quantization, defined in NumPy for every framework.

A scale maps values into the range of a format, a cast rounds them to 8-bit codes, and codes come back as values:

    >>> import numpy as np
    >>> import fp8_common as fp8
    >>> x = np.float32([0.1, -3.0, 1.5])
    >>> scale = fp8.amax_to_scale(fp8.amax(x), fp8.E4M3)
    >>> codes = fp8.quantize(x, scale, fp8.E4M3)
    >>> fp8.dequantize(codes, scale, fp8.E4M3)
    array([ 0.10044643, -3.        ,  1.5       ], dtype=float32)

`fp8_common.torch` and `fp8_common.jax` have the same functions on tensors and arrays, equal bit for bit. `numerics` has
all NumPy functions, `formats` the formats, `presets` scale policies of other projects, `recipe` the recipes, and
`rules` patterns of layer names. Importing this package loads neither torch nor jax nor triton.
"""

from fp8_common import formats, numerics, presets, recipe, rules
from fp8_common._reference.gradient_messages import GradientCompression
from fp8_common.errors import Fp8Error, Fp8StaleError, Fp8UnsupportedError
from fp8_common.formats import E4M3, E5M2, E8M0, Format
from fp8_common.numerics import (
    amax,
    amax_to_scale,
    dequantize,
    dequantize_blockwise,
    dequantize_mx,
    quantize,
    quantize_blockwise,
    quantize_mx,
    quantize_rowwise,
)
from fp8_common.policy import CANONICAL, POWER_OF_2, ScalePolicy
from fp8_common.recipe import RECIPES, CastRecipe, Recipe
from fp8_common.rules import Rules

__version__ = "0.1.0"

__all__ = [
    "CANONICAL",
    "E4M3",
    "E5M2",
    "E8M0",
    "POWER_OF_2",
    "RECIPES",
    "CastRecipe",
    "Format",
    "Fp8Error",
    "Fp8StaleError",
    "Fp8UnsupportedError",
    "GradientCompression",
    "Recipe",
    "Rules",
    "ScalePolicy",
    "amax",
    "amax_to_scale",
    "dequantize",
    "dequantize_blockwise",
    "dequantize_mx",
    "formats",
    "numerics",
    "presets",
    "quantize",
    "quantize_blockwise",
    "quantize_mx",
    "quantize_rowwise",
    "recipe",
    "rules",
]
