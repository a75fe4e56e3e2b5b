"""What plugins need of `fp8_common.jax` beside the public names: keys, casts by known scales, exact division, axes.

Nothing else of `fp8_common.jax` is for plugins: modules and names with an underscore change without notice.
"""

from fp8_common.jax._arrays import float_key
from fp8_common.jax._compat import vary_alike, varying_axes
from fp8_common.jax._dispatch import quantize_slices_to_codes, quantize_to_codes, quantize_to_codes_with_amax
from fp8_common.jax._division import divide_nearest
from fp8_common.jax._quantize import multiply_back

__all__ = [
    "divide_nearest",
    "float_key",
    "multiply_back",
    "quantize_slices_to_codes",
    "quantize_to_codes",
    "quantize_to_codes_with_amax",
    "vary_alike",
    "varying_axes",
]
