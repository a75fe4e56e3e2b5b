"""`fp8_dot_general` and `fp8_einsum`: matmuls of two arrays in FP8, with their two gradients."""

import dataclasses
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from fp8_common import Fp8Error
from fp8_jax_owg.dots.contraction import Contraction, DimensionNumbers
from fp8_jax_owg.dots.einsum import as_contraction
from fp8_jax_owg.dots.operand import Fp8Param, Kernel, as_kernel, as_operand
from fp8_jax_owg.dots.product import Product, match_state, run
from fp8_jax_owg.dots.rows import RowProduct, multiply_by_row
from fp8_jax_owg.scaling import TENSORS, ScalingChoice, by_row
from fp8_jax_owg.sharding import refuse_explicit_axes
from fp8_jax_owg.state.pairs import Meta

Precision = Any
"""What `lax.dot_general` takes as precision."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Matmul:
    """A contraction with its settings; see `fp8_jax_owg.dots.product.Bilinear`.

    Attributes:
        contraction: Which dimensions meet.
        precision: Of all three matmuls; None leaves XLA's default forward, and no fast accumulation backward.
        out_sharding: Of the result.
    """

    contraction: Contraction
    precision: Precision = None
    out_sharding: Any = None

    @property
    def backward_precision(self) -> Precision:
        """The precision of both gradients."""
        return lax.Precision.HIGHEST if self.precision is None else self.precision

    def prepare(self, x: jax.Array, extra: None) -> jax.Array:
        """Return `x`."""
        return x

    def forward(self, lhs: jax.Array, rhs: jax.Array, extra: None) -> jax.Array:
        """Return the float32 result of native FP8 operands."""
        return self.contraction.apply(lhs, rhs, np.float32, self.precision, out_sharding=self.out_sharding)

    def gradients(
        self, lhs: jax.Array, rhs: jax.Array, grad: jax.Array, extra: None, kernel_dtype: np.dtype
    ) -> tuple[jax.Array, jax.Array]:
        """Return both gradients, sharded like what they belong to."""
        how, precision = self.contraction, self.backward_precision
        d_lhs = how.for_lhs.apply(grad, rhs, np.float32, precision, lhs)
        return d_lhs, how.for_rhs.apply(lhs, grad, kernel_dtype, precision, rhs)


def fp8_dot_general(
    lhs: ArrayLike,
    rhs: ArrayLike | Fp8Param,
    dimension_numbers: DimensionNumbers,
    precision: Precision = None,
    preferred_element_type: DTypeLike | None = None,
    *,
    meta: Meta | None = None,
    scaling: ScalingChoice | None = None,
    out_sharding: Any = None,
) -> jax.Array:
    """`lax.dot_general` with FP8 operands in the matmul and in both of its gradients.

    The gradient of each leaf of `meta` is what was observed under `fp8_jax_owg.value_and_grad`, its next value under
    plain `jax.grad`. Other derivatives are those of the matmul of the cast operands, with a cast output gradient. Sums
    are accumulated in float32.

    Args:
        lhs: float16, bfloat16 or float32: the activations.
        rhs: float16, bfloat16 or float32, not necessarily the dtype of `lhs`: the kernel. Or the result of
            `fp8_all_gather`, which has observed the kernel already.
        dimension_numbers: As in `lax.dot_general`.
        precision: As in `lax.dot_general`; None is its default forward and the highest backward, which on GPUs
            switches fast accumulation of gradients off.
        preferred_element_type: The dtype of the result; None is that of `lhs`.
        meta: The six leaves of `init_meta`, for delayed scaling; None for current scaling.
        scaling: `DelayedScaling`, `CurrentScaling`, or a recipe of `fp8_common` (object, name or dictionary); None
            is `DelayedScaling()` with `meta`, else `CurrentScaling()`.
        out_sharding: As in `lax.dot_general`; on meshes with automatic axes it is a constraint.

    Returns:
        The shape of `lax.dot_general`.

    Raises:
        Fp8Error: Unsupported dtypes, or `meta` and `scaling` do not belong together.
        Fp8UnsupportedError: A forward-mode or second derivative was asked for, or scales per row on a mesh with
            explicit axes.
    """
    a, b = as_operand(lhs, "lhs"), as_kernel(rhs)
    contraction = Contraction.from_dimension_numbers(dimension_numbers, a.ndim, b.ndim)
    how = Matmul(contraction=contraction, precision=precision, out_sharding=out_sharding)
    return _contract(a, b, how, preferred_element_type, meta, scaling)


def fp8_einsum(
    equation: str,
    lhs: ArrayLike,
    rhs: ArrayLike | Fp8Param,
    precision: Precision = None,
    preferred_element_type: DTypeLike | None = None,
    *,
    meta: Meta | None = None,
    scaling: ScalingChoice | None = None,
    out_sharding: Any = None,
) -> jax.Array:
    """`jnp.einsum` of two operands, as `fp8_dot_general` computes it.

    Diagonals (`ii,ij->j`) and sums over dimensions of one operand (`ij,k->k`) are taken before the cast, in the
    operand's own precision.

    Args:
        equation: Two operands in letters and `...`, with or without `->`.
        lhs: float16, bfloat16 or float32: the activations.
        rhs: float16, bfloat16 or float32: the kernel.
        precision: As in `fp8_dot_general`.
        preferred_element_type: The dtype of the result; None is that of `lhs`.
        meta: As in `fp8_dot_general`.
        scaling: As in `fp8_dot_general`.
        out_sharding: As in `fp8_dot_general`.

    Returns:
        The shape of `jnp.einsum`.

    Raises:
        Fp8Error: The equation does not describe two operands or does not fit their shapes, or as in
            `fp8_dot_general`.
    """
    a, b, contraction = as_contraction(equation, as_operand(lhs, "lhs"), as_kernel(rhs))
    how = Matmul(contraction=contraction, precision=precision, out_sharding=out_sharding)
    return _contract(a, b, how, preferred_element_type, meta, scaling)


def _contract(
    lhs: jax.Array,
    rhs: Kernel,
    how: Matmul,
    dtype: DTypeLike | None,
    meta: Meta | None,
    scaling: ScalingChoice | None,
) -> jax.Array:
    is_cast = isinstance(rhs, Fp8Param)
    scaling, live = match_state(meta, scaling, ("input", "output_grad") if is_cast else TENSORS)
    result = np.dtype(lhs.dtype if dtype is None else dtype)
    if by_row(scaling):
        if isinstance(rhs, Fp8Param):
            raise Fp8Error('A gathered kernel has one scale: use CurrentScaling(granularity="tensor") for its matmul.')
        refuse_explicit_axes("Scales per row", (lhs, rhs))
        return multiply_by_row(RowProduct(how=how, scaling=scaling, dtype=result), lhs, rhs)
    product = Product(
        how=how,
        scaling=scaling,
        dtype=result,
        operand_dtypes=(lhs.dtype, rhs.gradient.dtype if isinstance(rhs, Fp8Param) else rhs.dtype),
        kernel_is_cast=is_cast,
    )
    return run(product, lhs, rhs, None, live)
