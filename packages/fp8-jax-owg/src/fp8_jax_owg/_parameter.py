"""`Fp8Param`: a parameter that was cast to FP8 before the layer that uses it."""

from typing import NamedTuple

import jax


class Fp8Param(NamedTuple):
    """A parameter in FP8, from `fp8_all_gather`; `fp8_dot_general` and `fp8_einsum` take it as `rhs`.

    Attributes:
        data: E4M3 codes in the native dtype, shape of the parameter.
        scale_inv: float32 scalar, multiplies `data` back.
        gradient: Shape of the parameter, in its dtype. Its value is never read: products send the gradient of the
            parameter here, because FP8 codes could not carry it.
    """

    data: jax.Array
    scale_inv: jax.Array
    gradient: jax.Array

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the parameter."""
        return self.data.shape

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return self.data.ndim
