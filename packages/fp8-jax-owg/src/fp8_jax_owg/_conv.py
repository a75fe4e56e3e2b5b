"""`fp8_conv_general_dilated`: a convolution with FP8 operands forward, and backward if asked for.

XLA refuses a convolution of two different float8 dtypes, which is what gradients in E5M2 would need. So the backward
convolutions run on bfloat16, which holds all FP8 values: the operands are those of the forward one, and the output
gradient, which by default is not cast to FP8 and has no state, or its FP8 values.
"""

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from fp8_common import Fp8Error
from fp8_common.jax.compat import vary_alike
from fp8_jax_owg._casting import Operand, Seen, State, cast, keeps_operands, next_state
from fp8_jax_owg._dot import Precision, as_operand, match_scaling
from fp8_jax_owg._first_order import first_order_only
from fp8_jax_owg._meshes import constrain
from fp8_jax_owg._meta import Meta
from fp8_jax_owg._recipes import ScalingChoice
from fp8_jax_owg._scaling import TENSORS, Scaling, Tensor, format_of

CONV_TENSORS: tuple[Tensor, ...] = ("input", "kernel")
"""The tensors of a convolution that are cast, and so have state."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Conv:
    """What is static about a convolution; `options` are those of `lax.conv_general_dilated`."""

    fp8_backward: bool

    scaling: Scaling
    dtype: np.dtype
    operand_dtypes: tuple[np.dtype, np.dtype]
    options: tuple[tuple[str, Any], ...]

    def apply(self, lhs: jax.Array, rhs: jax.Array, dtype: DTypeLike | None = None) -> jax.Array:
        """Convolve two arrays of one dtype."""
        return lax.conv_general_dilated(lhs, rhs, preferred_element_type=dtype, **dict(self.options))


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
    fp8_backward: bool = False,
    out_sharding: Any = None,
) -> jax.Array:
    """`lax.conv_general_dilated` with E4M3 operands forward and bfloat16 operands backward, or FP8 values in them.

    Args:
        lhs: float16, bfloat16 or float32: the activations.
        rhs: float16, bfloat16 or float32: the kernel.
        window_strides: As in `lax.conv_general_dilated`, like all up to `precision`.
        padding: "SAME", "VALID", ... or a pair for each spatial dimension.
        lhs_dilation: Dilation of the activations.
        rhs_dilation: Dilation of the kernel.
        dimension_numbers: Which dimension is which.
        feature_group_count: Number of feature groups.
        batch_group_count: Number of batch groups.
        precision: Of the products.
        preferred_element_type: The dtype of the result; None is that of `lhs`.
        meta: For delayed scaling, the leaves of `init_meta(scaling, CONV_TENSORS)`, or with `fp8_backward` those of
            `init_meta(scaling)`; None for current scaling.
        scaling: As in `fp8_dot_general`; scales per row are not supported here.
        fp8_backward: Cast the output gradient to FP8 as well, as layers do. The products of its values are computed in
            bfloat16, because XLA has no convolution of two FP8 formats: this is no faster.
        out_sharding: As in `fp8_dot_general`.

    Returns:
        The shape of `lax.conv_general_dilated`.

    Raises:
        Fp8Error: Unsupported dtypes, or `meta` and `scaling` do not belong together.
        Fp8UnsupportedError: A second derivative was asked for.
    """
    a, b = as_operand(lhs, "lhs"), as_operand(rhs, "rhs")
    scaling, state = match_scaling(meta, scaling, TENSORS if fp8_backward else CONV_TENSORS)
    if keeps_operands(scaling):
        raise Fp8Error('A convolution has one scale per tensor: use CurrentScaling(granularity="tensor").')
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
    dtype = np.dtype(a.dtype if preferred_element_type is None else preferred_element_type)
    how = _Conv(
        scaling=scaling,
        dtype=dtype,
        operand_dtypes=(a.dtype, b.dtype),
        options=tuple(options.items()),
        fp8_backward=fp8_backward,
    )
    return constrain(_convolve(how, *vary_alike((a, b), state), state), out_sharding)


Residuals = tuple[Operand, Operand, State]


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _convolve(how: _Conv, lhs: jax.Array, rhs: jax.Array, state: State) -> jax.Array:
    return _convolve_fwd(how, lhs, rhs, state)[0]


def _convolve_fwd(how: _Conv, lhs: jax.Array, rhs: jax.Array, state: State) -> tuple[jax.Array, Residuals]:
    a = cast(first_order_only(lhs), "input", state, how.scaling)
    b = cast(first_order_only(rhs), "kernel", state, how.scaling)
    fmt = format_of("input", how.scaling)
    product = how.apply(a.values(fmt), b.values(fmt), jnp.float32)
    return (product * (a.scale_inv * b.scale_inv)).astype(how.dtype), (a, b, state)


def _convolve_bwd(how: _Conv, residuals: Residuals, g: jax.Array) -> tuple[jax.Array, jax.Array, State]:
    a, b, state = residuals
    # The codes as bfloat16, which holds every E4M3 value: their scales multiply the results, in float32.
    fmt = format_of("input", how.scaling)
    # For JAX's rules of both transposed convolutions; the convolution itself is not used here, and XLA leaves it out.
    _, transposed = jax.vjp(how.apply, a.values(fmt).astype(jnp.bfloat16), b.values(fmt).astype(jnp.bfloat16))
    g, of_g = first_order_only(g), jnp.float32(1)
    seen: dict[Tensor, Seen | None] = {"input": a.seen, "kernel": b.seen}
    if how.fp8_backward:
        c = cast(g, "output_grad", state, how.scaling)
        g, of_g, seen["output_grad"] = c.values(format_of("output_grad", how.scaling)), c.scale_inv, c.seen
    d_lhs, d_rhs = transposed(g.astype(jnp.bfloat16))
    of_lhs, of_rhs = how.operand_dtypes
    return (
        (d_lhs.astype(jnp.float32) * (b.scale_inv * of_g)).astype(of_lhs),
        (d_rhs.astype(jnp.float32) * (a.scale_inv * of_g)).astype(of_rhs),
        next_state(state, seen),
    )


_convolve.defvjp(_convolve_fwd, _convolve_bwd)
