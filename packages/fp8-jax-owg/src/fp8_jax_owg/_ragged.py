"""`fp8_ragged_dot`: rows of lhs in consecutive groups, each multiplied in FP8 by a matrix of its own.

Mixture-of-experts layers use it with one group for each expert. Groups may be empty, and rows behind the last group
belong to none: they give zeros, get none, and are not observed.
"""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from fp8_common import Fp8Error
from fp8_common.jax.compat import vary_alike
from fp8_jax_owg._casting import Operand, State, cast, keeps_operands, next_state
from fp8_jax_owg._dot import as_operand, match_scaling
from fp8_jax_owg._first_order import first_order_only
from fp8_jax_owg._meshes import refuse_explicit_axes
from fp8_jax_owg._meta import Meta
from fp8_jax_owg._recipes import ScalingChoice
from fp8_jax_owg._scaling import Scaling, format_of

BY_ROWS = lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((0,), (0,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[]
)
"""Gradient of the matrices: the rows of each group are summed over."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Ragged:
    """What is static about a ragged product."""

    scaling: Scaling
    dtype: np.dtype
    operand_dtypes: tuple[np.dtype, np.dtype]


def fp8_ragged_dot(
    lhs: ArrayLike,
    rhs: ArrayLike,
    group_sizes: ArrayLike,
    preferred_element_type: DTypeLike | None = None,
    *,
    meta: Meta | None = None,
    scaling: ScalingChoice | None = None,
) -> jax.Array:
    """`lax.ragged_dot` with FP8 operands in the product and in both of its gradients.

    Args:
        lhs: float16, bfloat16 or float32 [M, K]: the rows, sorted by group.
        rhs: float16, bfloat16 or float32 [G, K, N]: a matrix for each group. All share one scale.
        group_sizes: Integers [G], rows in each group; zeros are allowed, and their sum may be less than M.
        preferred_element_type: The dtype of the result; None is that of `lhs`.
        meta: As in `fp8_dot_general`.
        scaling: As in `fp8_dot_general`; scales per row are not supported here.

    Returns:
        [M, N]; zeros in rows of no group.

    Raises:
        Fp8Error: Shapes do not fit, or as in `fp8_dot_general`.
        Fp8UnsupportedError: A second derivative was asked for.
    """
    a, b, sizes = as_operand(lhs, "lhs"), as_operand(rhs, "rhs"), jnp.asarray(group_sizes)
    if (a.ndim, b.ndim) != (2, 3) or a.shape[1] != b.shape[1] or sizes.shape != b.shape[:1]:
        raise Fp8Error(
            "fp8_ragged_dot needs lhs [M, K], rhs [G, K, N] and group_sizes [G], "
            f"got {a.shape}, {b.shape} and {sizes.shape}."
        )
    refuse_explicit_axes("fp8_ragged_dot", (a, b))
    scaling, state = match_scaling(meta, scaling)
    if keeps_operands(scaling):
        raise Fp8Error('fp8_ragged_dot has one scale per tensor: use CurrentScaling(granularity="tensor").')
    dtype = np.dtype(a.dtype if preferred_element_type is None else preferred_element_type)
    how = _Ragged(scaling=scaling, dtype=dtype, operand_dtypes=(a.dtype, b.dtype))
    a, b, sizes = vary_alike((a, b, sizes.astype(jnp.int32)), state)
    return _ragged(how, a, b, sizes, state)


Residuals = tuple[Operand, Operand, jax.Array, State]


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _ragged(how: _Ragged, lhs: jax.Array, rhs: jax.Array, sizes: jax.Array, state: State) -> jax.Array:
    return _ragged_fwd(how, lhs, rhs, sizes, state)[0]


def _ragged_fwd(
    how: _Ragged, lhs: jax.Array, rhs: jax.Array, sizes: jax.Array, state: State
) -> tuple[jax.Array, Residuals]:
    scaling = how.scaling
    a = cast(_rows_of_groups(first_order_only(lhs), sizes), "input", state, scaling)
    b = cast(first_order_only(rhs), "kernel", state, scaling)
    fmt = format_of("input", scaling)
    product = lax.ragged_dot(a.values(fmt), b.values(fmt), sizes, preferred_element_type=jnp.float32)
    return _scaled_back(product, a, b, how.dtype), (a, b, sizes, state)


def _ragged_bwd(how: _Ragged, residuals: Residuals, g: jax.Array) -> tuple[jax.Array, jax.Array, None, State]:
    a, b, sizes, state = residuals
    scaling = how.scaling
    g = _rows_of_groups(first_order_only(g), sizes)
    c = cast(g, "output_grad", state, scaling)
    fmt, of_gradient = format_of("input", scaling), format_of("output_grad", scaling)
    matrices, gradient = jnp.swapaxes(b.values(fmt), 1, 2), c.values(of_gradient)
    # The precision that gradients have in `_dot` where none is asked for.
    d_lhs = lax.ragged_dot(gradient, matrices, sizes, lax.Precision.HIGHEST, jnp.float32)
    d_rhs = lax.ragged_dot_general(a.values(fmt), gradient, sizes, BY_ROWS, lax.Precision.HIGHEST, jnp.float32)
    of_lhs, of_rhs = how.operand_dtypes
    observed = next_state(state, {"input": a.seen, "kernel": b.seen, "output_grad": c.seen})
    return _scaled_back(d_lhs, c, b, of_lhs), _scaled_back(d_rhs, a, c, of_rhs), None, observed


_ragged.defvjp(_ragged_fwd, _ragged_bwd)


def _rows_of_groups(x: jax.Array, sizes: jax.Array) -> jax.Array:
    """Put zeros into the rows behind the last group: whatever stands there must not be observed."""
    inside = jnp.arange(x.shape[0], dtype=jnp.int32) < jnp.sum(sizes)
    return jnp.where(inside[:, None], x, jnp.zeros((), x.dtype))


def _scaled_back(product: jax.Array, a: Operand, b: Operand, dtype: np.dtype) -> jax.Array:
    return (product * (a.scale_inv * b.scale_inv)).astype(dtype)
