"""What Linen layers call instead of `lax.dot_general`, `jnp.einsum` and `lax.conv_general_dilated`.

`nn.Dense(..., dot_general_cls=Fp8DotGeneralOp)`; `functools.partial(Fp8DotGeneralOp, scaling=...)` passes settings. All
take the attributes of `fp8_jax_owg.linen._variables.Fp8Op`.
"""

from typing import Any

import jax
from flax import linen as nn
from jax.typing import ArrayLike, DTypeLike

from fp8_jax_owg._contraction import DimensionNumbers
from fp8_jax_owg._conv import CONV_TENSORS, fp8_conv_general_dilated
from fp8_jax_owg._dot import fp8_dot_general
from fp8_jax_owg._einsum import fp8_einsum
from fp8_jax_owg._scaling import TENSORS
from fp8_jax_owg.linen._variables import Fp8Op


class Fp8DotGeneralOp(Fp8Op):
    """`lax.dot_general` in FP8, with its state in the collection `_overwrite_with_gradient`.

    For `dot_general_cls` of `nn.Dense` and `nn.DenseGeneral`, and for `qkv_dot_general_cls` and `out_dot_general_cls`
    of `nn.MultiHeadDotProductAttention`.
    """

    @nn.compact
    def __call__(
        self,
        lhs: ArrayLike,
        rhs: ArrayLike,
        dimension_numbers: DimensionNumbers,
        precision: Any = None,
        preferred_element_type: DTypeLike | None = None,
    ) -> jax.Array:
        """Multiply; arguments and errors are those of `fp8_jax_owg.fp8_dot_general`."""
        kernel, settings = self.settings(rhs)
        return fp8_dot_general(lhs, kernel, dimension_numbers, precision, preferred_element_type, **settings)


class Fp8DirectDotGeneralOp(Fp8DotGeneralOp):
    """The same under the name that stands in the checkpoints of models with flax's operation of this name."""


class Fp8Einsum(Fp8Op):
    """`jnp.einsum` of two operands in FP8: `Fp8Einsum()("bsd,de->bse", x, kernel)`."""

    @nn.compact
    def __call__(
        self,
        equation: str,
        lhs: ArrayLike,
        rhs: ArrayLike,
        precision: Any = None,
        preferred_element_type: DTypeLike | None = None,
    ) -> jax.Array:
        """Multiply; arguments and errors are those of `fp8_jax_owg.fp8_einsum`."""
        kernel, settings = self.settings(rhs)
        return fp8_einsum(equation, lhs, kernel, precision, preferred_element_type, **settings)


class Fp8ConvGeneralDilatedOp(Fp8Op):
    """`lax.conv_general_dilated`, forward in FP8 and backward in bfloat16; it has no state of the output gradient.

    For `conv_general_dilated_cls` of `nn.Conv`.

    Attributes:
        fp8_backward: Cast the output gradient to FP8 too, with a state of its own.
    """

    fp8_backward: bool = False

    @nn.compact
    def __call__(self, lhs: ArrayLike, rhs: ArrayLike, *args: Any, **kwargs: Any) -> jax.Array:
        """Convolve; arguments and errors are those of `fp8_jax_owg.fp8_conv_general_dilated`."""
        kernel, settings = self.settings(rhs, TENSORS if self.fp8_backward else CONV_TENSORS)
        return fp8_conv_general_dilated(lhs, kernel, *args, **kwargs, **settings, fp8_backward=self.fp8_backward)
