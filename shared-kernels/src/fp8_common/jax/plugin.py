"""What plugins need of `fp8_common.jax` beside the public names: bits, casts by known scales, axes of `shard_map`.

Nothing else of `fp8_common.jax` is for plugins: modules and names with an underscore change without notice.
"""

from fp8_common.jax._arrays import float_key, from_bits, to_bits
from fp8_common.jax._compat import vary_alike, varying_axes
from fp8_common.jax._dispatch import quantize_to_codes
from fp8_common.jax._quantize import multiply_back

__all__ = ["float_key", "from_bits", "multiply_back", "quantize_to_codes", "to_bits", "vary_alike", "varying_axes"]
