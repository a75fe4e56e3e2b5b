"""Decides what Linen convolutions call: `nn.Conv(..., conv_general_dilated_cls=Fp8ConvGeneralDilatedOp)`."""

from typing import Any

import jax
from flax import linen as nn
from jax.typing import ArrayLike

from fp8_jax_owg.conv import CONV_TENSORS, fp8_conv_general_dilated
from fp8_jax_owg.linen.variables import Fp8Op


class Fp8ConvGeneralDilatedOp(Fp8Op):
    """`lax.conv_general_dilated`, forward in FP8 and backward in bfloat16; it has no state of the output gradient.

    Attributes:
        scaling: `DelayedScaling` (the default) or `CurrentScaling`, which has no state.
        amax_history_length: Overrides that of `scaling`.
    """

    @nn.compact
    def __call__(self, lhs: ArrayLike, rhs: ArrayLike, *args: Any, **kwargs: Any) -> jax.Array:
        """Convolve; arguments and errors are those of `fp8_jax_owg.fp8_conv_general_dilated`."""
        return fp8_conv_general_dilated(lhs, rhs, *args, **kwargs, meta=self.state(CONV_TENSORS), scaling=self.scaling)
