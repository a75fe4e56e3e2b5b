"""Casts for custom layers: quantize, or quantize and dequantize.

Every function with a scale and an amax history observes the tensor that it casts, as matmuls do.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from fp8_common import Fp8Error
from fp8_common.jax.casts import multiply_back
from fp8_common.jax.numerics import vary_alike
from fp8_jax_owg.dots.operands import as_operand, cast_operand, to_uint8_codes
from fp8_jax_owg.scaling import DelayedScaling, ScalingChoice, TensorName, as_scaling
from fp8_jax_owg.state.cotangents import first_order_only, like, reverse_mode_only
from fp8_jax_owg.state.in_loss import as_live, observation, scales_of
from fp8_jax_owg.state.pairs import Pair


class _Cast(NamedTuple):
    """Static settings of a cast."""

    scaling: DelayedScaling
    tensor: TensorName

    def apply(self, x: jax.Array, live: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return native FP8 values, the dequantization scale, and the observation."""
        scales = scales_of({self.tensor: live}, self.scaling)[self.tensor]
        cast = cast_operand(self.scaling, self.tensor, first_order_only(x), scales)
        return cast.values, cast.back, observation(like(cast.amax, live), cast.back, live)

    def round(self, x: jax.Array, live: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return `x` rounded to FP8 in its own dtype, and the observation."""
        values, back, seen = self.apply(x, live)
        fmt = self.scaling.format_of(self.tensor)
        return multiply_back(to_uint8_codes(values), back.reshape((1,) * x.ndim), fmt, x.dtype), seen


def in_q(
    x: ArrayLike, scale: jax.Array, amax_history: jax.Array, scaling: ScalingChoice | None = None
) -> tuple[jax.Array, jax.Array]:
    """Quantize an input of a matmul, and observe it.

    Args:
        x: float16, bfloat16 or float32, any shape. Its gradient is zero, because codes have no gradient: the matmul
            must define it.
        scale: float32 (1,), the stored scale.
        amax_history: float32 (length,).
        scaling: `DelayedScaling`, or a recipe with delayed scaling; None is `DelayedScaling()`.

    Returns:
        (array of the shape of `x` in the native dtype of the forward format, float32 scalar that dequantizes it).

    Raises:
        Fp8Error: If a dtype or a shape is not supported, or the scaling is not delayed.
    """
    return _run(_in_q, x, Pair(scale, amax_history), scaling, "input")


def in_qdq(x: ArrayLike, scale: jax.Array, amax_history: jax.Array, scaling: ScalingChoice | None = None) -> jax.Array:
    """Return `x` rounded to the forward FP8 format, and observe it.

    The result has the shape and dtype of `x`; the gradient passes unchanged. Arguments and errors as for `in_q`.
    """
    return _run(_qdq, x, Pair(scale, amax_history), scaling, "input")


def out_qdq(y: ArrayLike, scale: jax.Array, amax_history: jax.Array, scaling: ScalingChoice | None = None) -> jax.Array:
    """Return `y` unchanged; round its gradient to FP8, and observe that.

    Arguments and errors as for `in_q`.
    """
    return _run(_qdq, y, Pair(scale, amax_history), scaling, "output_grad")


def out_dq(y: ArrayLike, lhs_scale: jax.Array, rhs_scale: jax.Array, dtype: DTypeLike = jnp.float32) -> jax.Array:
    """Dequantize the matmul of two FP8 arrays.

    The gradient passes to `y` unscaled, because it belongs to the values that were cast, not to their codes. The scales
    get no gradient.

    Args:
        y: float32, float16 or bfloat16: the matmul of the codes.
        lhs_scale: float32 scalar from `in_q` of lhs.
        rhs_scale: float32 scalar from `in_q` of rhs.
        dtype: dtype of the result.

    Returns:
        `y * (lhs_scale * rhs_scale)`, computed in float32.
    """
    return _out_dq(np.dtype(dtype), as_operand(y, "y"), lhs_scale, rhs_scale)


def _run(
    function: Callable[..., Any], x: ArrayLike, pair: Pair, scaling: ScalingChoice | None, tensor: TensorName
) -> Any:
    settings = as_scaling(scaling or DelayedScaling())
    if not isinstance(settings, DelayedScaling):
        raise Fp8Error(f"A cast with a scale and an amax history needs delayed scaling, got {settings!r}.")
    live = as_live(pair, tensor)
    with reverse_mode_only():
        return function(_Cast(settings, tensor), vary_alike(as_operand(x, "The operand of a cast"), live), live)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _in_q(settings: _Cast, x: jax.Array, live: jax.Array) -> tuple[jax.Array, jax.Array]:
    return _in_q_fwd(settings, x, live)[0]


def _in_q_fwd(settings: _Cast, x: jax.Array, live: jax.Array) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
    values, back, seen = settings.apply(x, live)
    return (values, back), seen


_in_q.defvjp(_in_q_fwd, lambda settings, seen, _: (None, seen))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _qdq(settings: _Cast, x: jax.Array, live: jax.Array) -> jax.Array:
    return _qdq_fwd(settings, x, live)[0]


def _qdq_fwd(settings: _Cast, x: jax.Array, live: jax.Array) -> tuple[jax.Array, jax.Array]:
    # The forward of an output casts nothing. Its state is saved for the backward rule, which casts the gradient.
    return (x, live) if settings.tensor == "output_grad" else settings.round(x, live)


def _qdq_bwd(settings: _Cast, residual: jax.Array, g: jax.Array) -> tuple[jax.Array, jax.Array]:
    return settings.round(g, residual) if settings.tensor == "output_grad" else (g, residual)


_qdq.defvjp(_qdq_fwd, _qdq_bwd)


# A JVP is enough: it converts the tangent of `y`, and JAX transposes conversions.
@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _out_dq(dtype: np.dtype, y: jax.Array, lhs_scale: jax.Array, rhs_scale: jax.Array) -> jax.Array:
    return (y.astype(jnp.float32) * (lhs_scale * rhs_scale)).astype(dtype)


@_out_dq.defjvp
def _unscaled(dtype: np.dtype, primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    return _out_dq(dtype, *primals), tangents[0].astype(dtype)
