"""`fp8_ragged_dot`: FP8 matmul of row groups with one matrix each.

Mixture-of-experts layers use it with one group for each expert. Groups may be empty. Rows after the last group belong
to no group: their results and gradients are zero, and they are not observed.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from fp8_common import Fp8Error
from fp8_jax_owg.dots.bilinear import Bilinear, multiply
from fp8_jax_owg.dots.operands import as_operand, refuse_explicit_axes
from fp8_jax_owg.scaling import ScalingChoice
from fp8_jax_owg.state.pairs import Meta

BY_ROWS = lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((0,), (0,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[]
)
"""Dimension numbers for the gradient of the matrices, which sums over the rows of each group."""


@dataclasses.dataclass(frozen=True, slots=True)
class RaggedRows(Bilinear):
    """Matmul of groups of rows; `extra` holds the group sizes, int32 [G]."""

    def prepare(self, x: jax.Array, extra: jax.Array) -> jax.Array:
        """Set rows after the last group to zero, which are then unobserved."""
        inside = jnp.arange(x.shape[0], dtype=jnp.int32) < jnp.sum(extra)
        return jnp.where(inside[:, None], x, jnp.zeros((), x.dtype))

    def forward(self, lhs: jax.Array, rhs: jax.Array, extra: jax.Array, dtype: DTypeLike) -> jax.Array:
        """Return the grouped matmul of native FP8 operands in float32."""
        return lax.ragged_dot(lhs, rhs, extra, preferred_element_type=dtype)

    # Gradients have the precision that `fp8_dot_general` selects for gradients with precision=None.

    def lhs_gradient(self, rhs: jax.Array, grad: jax.Array, extra: jax.Array, dtype: DTypeLike, like: Any) -> jax.Array:
        """Return the unscaled gradient of lhs in float32."""
        return lax.ragged_dot(grad, jnp.swapaxes(rhs, 1, 2), extra, lax.Precision.HIGHEST, dtype)

    def rhs_gradient(self, lhs: jax.Array, grad: jax.Array, extra: jax.Array, dtype: DTypeLike, like: Any) -> jax.Array:
        """Return the unscaled gradient of rhs in float32."""
        return lax.ragged_dot_general(lhs, grad, extra, BY_ROWS, lax.Precision.HIGHEST, jnp.float32)


def fp8_ragged_dot(
    lhs: ArrayLike,
    rhs: ArrayLike,
    group_sizes: ArrayLike,
    preferred_element_type: DTypeLike | None = None,
    *,
    meta: Meta | None = None,
    scaling: ScalingChoice | None = None,
) -> jax.Array:
    """`lax.ragged_dot` with FP8 operands, in its gradients too.

    Args:
        lhs: float16, bfloat16 or float32 [M, K]: the rows, sorted by group.
        rhs: float16, bfloat16 or float32 [G, K, N]: one matrix per group. All matrices share one scale.
        group_sizes: Integers [G], the number of rows in each group; zeros are allowed, and the sum may be less than M.
        preferred_element_type: dtype of the result; None is the dtype of `lhs`.
        meta: As in `fp8_dot_general`.
        scaling: As in `fp8_dot_general`; scales per row are not supported here.

    Returns:
        [M, N]; zeros in rows that belong to no group.

    Raises:
        Fp8Error: If the shapes do not match, the scaling is row-wise, or as in `fp8_dot_general`.
        Fp8UnsupportedError: If JAX requests a forward-mode or second derivative, or `lhs` or `rhs` is sharded over an
            explicit mesh axis.

    Examples:
        >>> import jax.numpy as jnp
        >>> import fp8_jax_owg as owg
        >>> experts = jnp.stack([jnp.ones((16, 8)), 2 * jnp.ones((16, 8))])
        >>> y = owg.fp8_ragged_dot(jnp.ones((4, 16)), experts, jnp.array([1, 2]))
        >>> y[:, 0].round(3).tolist()  # one row for the first expert, two for the second, one for none
        [16.0, 32.0, 32.0, 0.0]
    """
    a, b, sizes = as_operand(lhs, "lhs"), as_operand(rhs, "rhs"), jnp.asarray(group_sizes)
    if (a.ndim, b.ndim) != (2, 3) or a.shape[1] != b.shape[1] or sizes.shape != b.shape[:1]:
        raise Fp8Error(
            "fp8_ragged_dot needs lhs [M, K], rhs [G, K, N] and group_sizes [G], "
            f"got {a.shape}, {b.shape} and {sizes.shape}."
        )
    refuse_explicit_axes("fp8_ragged_dot", (a, b))
    return multiply(RaggedRows(), a, b, preferred_element_type, meta, scaling, sizes.astype(jnp.int32))
