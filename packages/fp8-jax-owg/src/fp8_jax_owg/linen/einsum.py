"""Decides what Linen modules call instead of `jnp.einsum`."""

from typing import Any

import jax
from flax import linen as nn
from jax.typing import ArrayLike, DTypeLike

from fp8_jax_owg.einsum import fp8_einsum
from fp8_jax_owg.linen.variables import Fp8Op


class Fp8Einsum(Fp8Op):
    """`jnp.einsum` of two operands in FP8: `Fp8Einsum()("bsd,de->bse", x, kernel)`.

    Attributes:
        scaling: `DelayedScaling` (the default) or `CurrentScaling`, which has no state.
        amax_history_length: Overrides that of `scaling`, under the name that flax's operations give it.
    """

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
        return fp8_einsum(
            equation, lhs, rhs, precision, preferred_element_type, meta=self.state(), scaling=self.scaling
        )
