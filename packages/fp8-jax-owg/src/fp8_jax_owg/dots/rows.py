"""Matmuls with a scale for each row: each of the three sums over other dimensions, so all operands are cast again."""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from fp8_common.jax.arithmetic import divide_nearest
from fp8_common.jax.casts import cast_slices
from fp8_common.jax.compat import vary_alike
from fp8_jax_owg.dots.contraction import Contraction
from fp8_jax_owg.scaling import Scaling, Tensor, format_of, gradient_dtype
from fp8_jax_owg.state.first_order import first_order_only


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RowProduct:
    """What is static about one call.

    Attributes:
        how: A `fp8_jax_owg.dots.dot.Matmul`.
        scaling: With scales per row.
        dtype: Of the result.
    """

    how: Any
    scaling: Scaling
    dtype: np.dtype

    def apply(
        self,
        how: Contraction,
        lhs: tuple[Tensor, jax.Array],
        rhs: tuple[Tensor, jax.Array],
        dtype: np.dtype,
        *,
        precision: Any,
        unscaled: DTypeLike = np.float32,
        out_sharding: Any = None,
    ) -> jax.Array:
        """Cast both operands for one contraction, multiply, and scale back; `unscaled` is the dtype in between."""
        a, a_factor = self._cast(*lhs, how, how.lhs)
        b, b_factor = self._cast(*rhs, how, how.rhs)
        result = how.apply(a, b, unscaled, precision, out_sharding=out_sharding).astype(jnp.float32)
        # a barrier around the product of both would keep XLA on GPUs from multiplying in the matmul's own pass
        a_factor, b_factor = lax.optimization_barrier((a_factor, b_factor))
        return (result * (a_factor * b_factor)).astype(dtype)

    def _cast(self, tensor: Tensor, x: jax.Array, how: Contraction, letters: str) -> tuple[jax.Array, jax.Array]:
        fmt = format_of(tensor, self.scaling)
        values, scale = cast_slices(x, fmt, how.axes_of(letters), self.scaling.policy)
        return values, how.align(divide_nearest(1.0, scale), letters)


def multiply_by_row(product: RowProduct, lhs: jax.Array, rhs: jax.Array) -> jax.Array:
    """Return the result of checked operands."""
    return _multiply(product, *vary_alike((lhs, rhs)))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _multiply(product: RowProduct, lhs: jax.Array, rhs: jax.Array) -> jax.Array:
    how = product.how
    settings = {"precision": how.precision, "out_sharding": how.out_sharding}
    return product.apply(how.contraction, ("input", lhs), ("kernel", rhs), product.dtype, **settings)


def _forward(product: RowProduct, lhs: jax.Array, rhs: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    lhs, rhs = first_order_only(lhs), first_order_only(rhs)
    return _multiply(product, lhs, rhs), (lhs, rhs)


def _backward(product: RowProduct, residuals: tuple[jax.Array, jax.Array], g: jax.Array) -> tuple[jax.Array, jax.Array]:
    (lhs, rhs), g, how = residuals, first_order_only(g), product.how.contraction
    precision = product.how.backward_precision
    d_lhs = product.apply(how.for_lhs, ("output_grad", g), ("kernel", rhs), lhs.dtype, precision=precision)
    unscaled = gradient_dtype(product.scaling, rhs.dtype)
    d_rhs = product.apply(
        how.for_rhs, ("input", lhs), ("output_grad", g), rhs.dtype, precision=precision, unscaled=unscaled
    )
    return d_lhs, d_rhs


_multiply.defvjp(_forward, _backward)
