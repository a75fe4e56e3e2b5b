"""What plugins need of `fp8_common.jax` beside the public names: keys, casts, division, axes of `shard_map`.

Nothing else of `fp8_common.jax` is for plugins: modules and names with an underscore change without notice.
"""

from fp8_common.jax import _dispatch as dispatch
from fp8_common.jax._arrays import float_key
from fp8_common.jax._compat import vary_alike, varying_axes
from fp8_common.jax._quantize import multiply_back

__all__ = ["dispatch", "float_key", "multiply_back", "vary_alike", "varying_axes"]
