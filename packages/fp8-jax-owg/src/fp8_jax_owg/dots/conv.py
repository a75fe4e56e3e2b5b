"""`fp8_conv_general_dilated`: a convolution with FP8 operands forward.

XLA does not support a convolution of two different float8 dtypes, which gradients in E5M2 would need. So the backward
convolutions run in bfloat16, which holds all FP8 values. They use the FP8 operands of the forward; the output gradient
is rounded to bfloat16, not to FP8, and has no state.
"""

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from fp8_jax_owg.dots.bilinear import Bilinear, multiply
from fp8_jax_owg.dots.contraction import constrain
from fp8_jax_owg.dots.dot import Precision
from fp8_jax_owg.dots.operands import as_operand
from fp8_jax_owg.scaling import ScalingChoice, TensorName
from fp8_jax_owg.state.pairs import Meta

CONV_TENSORS: tuple[TensorName, ...] = ("input", "kernel")
"""Tensors of a convolution that are cast to FP8 and have state."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Convolution(Bilinear):
    """Convolution with the settings of `lax.conv_general_dilated`.

    Attributes:
        options: Names and values of its keyword arguments, all hashable.
    """

    options: tuple[tuple[str, Any], ...]
    tensors = CONV_TENSORS

    def forward(self, lhs: jax.Array, rhs: jax.Array, extra: None, dtype: DTypeLike) -> jax.Array:
        """Return the convolution of native FP8 operands in float32."""
        return lax.conv_general_dilated(lhs, rhs, preferred_element_type=dtype, **dict(self.options))

    # Both gradients are computed in bfloat16, which holds every FP8 value. A convolution is linear in either operand,
    # so its transpose needs only the type of that operand.

    def lhs_gradient(self, rhs: jax.Array, grad: jax.Array, extra: None, dtype: DTypeLike, like: Any) -> jax.Array:
        """Return the unscaled gradient of lhs in bfloat16."""
        convolve = partial(self._convolve, rhs=rhs.astype(jnp.bfloat16))
        (gradient,) = jax.linear_transpose(convolve, like.update(dtype=jnp.bfloat16))(grad.astype(jnp.bfloat16))
        return gradient

    def rhs_gradient(self, lhs: jax.Array, grad: jax.Array, extra: None, dtype: DTypeLike, like: Any) -> jax.Array:
        """Return the unscaled gradient of rhs in bfloat16."""
        convolve = lambda rhs: self._convolve(lhs.astype(jnp.bfloat16), rhs)  # noqa: E731
        (gradient,) = jax.linear_transpose(convolve, like.update(dtype=jnp.bfloat16))(grad.astype(jnp.bfloat16))
        return gradient

    def _convolve(self, lhs: jax.Array, rhs: jax.Array) -> jax.Array:
        return lax.conv_general_dilated(lhs, rhs, **dict(self.options))


def fp8_conv_general_dilated(
    lhs: ArrayLike,
    rhs: ArrayLike,
    window_strides: Sequence[int],
    padding: str | Sequence[tuple[int, int]],
    lhs_dilation: Sequence[int] | None = None,
    rhs_dilation: Sequence[int] | None = None,
    dimension_numbers: Any = None,
    feature_group_count: int = 1,
    batch_group_count: int = 1,
    precision: Precision = None,
    preferred_element_type: DTypeLike | None = None,
    *,
    meta: Meta | None = None,
    scaling: ScalingChoice | None = None,
    out_sharding: Any = None,
) -> jax.Array:
    """`lax.conv_general_dilated` with E4M3 operands forward and bfloat16 operands backward.

    Args:
        lhs: float16, bfloat16 or float32: the activations.
        rhs: float16, bfloat16 or float32: the kernel.
        window_strides: As in `lax.conv_general_dilated`, like all arguments up to `precision`.
        padding: "SAME", "VALID", "SAME_LOWER", or a pair for each spatial dimension.
        lhs_dilation: Dilation of the activations.
        rhs_dilation: Dilation of the kernel.
        dimension_numbers: Layouts of `lhs`, `rhs` and the result.
        feature_group_count: Number of feature groups.
        batch_group_count: Number of batch groups.
        precision: Precision of the forward and backward convolutions.
        preferred_element_type: dtype of the result; None is the dtype of `lhs`.
        meta: For delayed scaling, the leaves of `init_meta(scaling, ("input", "kernel"))`; None for current scaling.
        scaling: As in `fp8_dot_general`; scales per row are not supported here.
        out_sharding: As in `fp8_dot_general`.

    Returns:
        Array of the shape of `lax.conv_general_dilated`.

    Raises:
        Fp8Error: If a dtype is not supported, the scaling is row-wise, or `meta` and `scaling` do not match.
        Fp8UnsupportedError: If JAX requests a forward-mode or second derivative.

    Examples:
        >>> import jax.numpy as jnp
        >>> import fp8_jax_owg as owg
        >>> images, kernel = jnp.ones((1, 1, 5, 5)), jnp.ones((2, 1, 3, 3))  # [N, C, H, W], [O, I, H, W]
        >>> y = owg.fp8_conv_general_dilated(images, kernel, window_strides=(1, 1), padding="VALID")
        >>> y.shape, round(float(y[0, 0, 0, 0]), 3)
        ((1, 2, 3, 3), 9.0)
    """
    a, b = as_operand(lhs, "lhs"), as_operand(rhs, "rhs")
    options = {
        "window_strides": tuple(window_strides),
        "padding": padding if isinstance(padding, str) else tuple(map(tuple, padding)),
        "lhs_dilation": lhs_dilation and tuple(lhs_dilation),
        "rhs_dilation": rhs_dilation and tuple(rhs_dilation),
        "dimension_numbers": dimension_numbers,
        "feature_group_count": feature_group_count,
        "batch_group_count": batch_group_count,
        "precision": precision,
    }
    operation = Convolution(options=tuple(options.items()))
    return constrain(multiply(operation, a, b, preferred_element_type, meta, scaling), out_sharding)
