"""Decides what Linen layers call instead of `lax.dot_general`: `nn.Dense(..., dot_general_cls=Fp8DotGeneralOp)`."""

from typing import Any

import jax
from flax import linen as nn
from jax.typing import ArrayLike, DTypeLike

from fp8_jax_owg.contraction import DimensionNumbers
from fp8_jax_owg.dot import fp8_dot_general
from fp8_jax_owg.linen.variables import Fp8Op


class Fp8DotGeneralOp(Fp8Op):
    """`lax.dot_general` in FP8, with its state in the collection `_overwrite_with_gradient`.

    For `dot_general_cls` of `nn.Dense` and `nn.DenseGeneral`, and for `qkv_dot_general_cls` and `out_dot_general_cls`
    of `nn.MultiHeadDotProductAttention`; settings are passed by `functools.partial(Fp8DotGeneralOp, scaling=...)`.

    Attributes:
        scaling: `DelayedScaling` (the default) or `CurrentScaling`, which has no state.
        amax_history_length: Overrides that of `scaling`, under the name that flax's operations give it.
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
        return fp8_dot_general(
            lhs,
            rhs,
            dimension_numbers,
            precision,
            preferred_element_type,
            meta=self.state(),
            scaling=self.scaling,
        )


class Fp8DirectDotGeneralOp(Fp8DotGeneralOp):
    """The same under the name that stands in the checkpoints of models with flax's operation of this name."""
