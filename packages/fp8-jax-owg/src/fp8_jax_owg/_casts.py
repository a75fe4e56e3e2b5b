"""The casts that a layer of one's own is built from: quantize alone, or quantize and dequantize.

Every function that takes a scale and an amax history gives both their next value as gradient.
"""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from fp8_common import Format, Fp8Error
from fp8_common.jax.casts import multiply_back
from fp8_common.jax.compat import vary_alike
from fp8_jax_owg._casting import Operand, Seen, cast, next_state
from fp8_jax_owg._dot import as_operand
from fp8_jax_owg._first_order import first_order_only
from fp8_jax_owg._meta import TensorMeta, read_tensor_meta
from fp8_jax_owg._recipes import ScalingChoice, as_scaling
from fp8_jax_owg._scaling import DelayedScaling, Tensor, format_of


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Cast:
    """What is static about a cast."""

    scaling: DelayedScaling
    tensor: Tensor

    @property
    def fmt(self) -> Format:
        return format_of(self.tensor, self.scaling)


def in_q(
    x: ArrayLike, scale: jax.Array, amax_history: jax.Array, scaling: ScalingChoice | None = None
) -> tuple[jax.Array, jax.Array]:
    """Quantize an input of a product, and observe it.

    Args:
        x: float16, bfloat16 or float32. It gets a zero gradient: codes have none, the product gives it.
        scale: float32 (1,), the stored scale.
        amax_history: float32 (length,).
        scaling: `DelayedScaling`, or a recipe with delayed scaling; None is `DelayedScaling()`.

    Returns:
        (E4M3 array of the shape of `x`, float32 scalar that multiplies it back).

    Raises:
        Fp8Error: Unsupported dtypes or shapes.
    """
    meta = read_tensor_meta(scale, amax_history)
    return _in_q(_delayed(scaling, "input"), vary_alike(as_operand(x, "x"), meta), meta)


def in_qdq(x: ArrayLike, scale: jax.Array, amax_history: jax.Array, scaling: ScalingChoice | None = None) -> jax.Array:
    """Return `x` as E4M3 represents it, and observe it; the gradient of `x` passes unchanged.

    Arguments and errors are those of `in_q`; the result has the shape and dtype of `x`.
    """
    meta = read_tensor_meta(scale, amax_history)
    return _in_qdq(_delayed(scaling, "input"), vary_alike(as_operand(x, "x"), meta), meta)


def out_qdq(y: ArrayLike, scale: jax.Array, amax_history: jax.Array, scaling: ScalingChoice | None = None) -> jax.Array:
    """Return `y`; its gradient passes as the gradient format represents it, and is observed.

    Arguments and errors are those of `in_q`.
    """
    meta = read_tensor_meta(scale, amax_history)
    return _out_qdq(_delayed(scaling, "output_grad"), vary_alike(as_operand(y, "y"), meta), meta)


def out_dq(y: ArrayLike, lhs_scale: jax.Array, rhs_scale: jax.Array, dtype: DTypeLike = jnp.float32) -> jax.Array:
    """Scale the product of two FP8 arrays back; the gradient of `y` passes unscaled, the scales get none.

    The gradient belongs to the values that were cast, not to their codes: it goes where `y` came from.

    Args:
        y: float32, float16 or bfloat16: the product of the codes.
        lhs_scale: float32 scalar from `in_q` of lhs.
        rhs_scale: float32 scalar from `in_q` of rhs.
        dtype: The dtype of the result.

    Returns:
        `y * (lhs_scale * rhs_scale)`, computed in float32.
    """
    return _out_dq(np.dtype(dtype), as_operand(y, "y"), lhs_scale, rhs_scale)


def _delayed(scaling: ScalingChoice | None, tensor: Tensor) -> _Cast:
    found = as_scaling(scaling or DelayedScaling())
    if not isinstance(found, DelayedScaling):
        raise Fp8Error(f"A cast with a scale and an amax history needs delayed scaling, got {found!r}.")
    return _Cast(scaling=found, tensor=tensor)


Residuals = tuple[TensorMeta, Seen | None]


def _apply(how: _Cast, x: jax.Array, meta: TensorMeta) -> Operand:
    return cast(first_order_only(x), how.tensor, {how.tensor: meta}, how.scaling)


def _next(how: _Cast, meta: TensorMeta, seen: Seen | None) -> TensorMeta:
    return next_state({how.tensor: meta}, {how.tensor: seen})[how.tensor]


def _back(how: _Cast, made: Operand, dtype: np.dtype) -> jax.Array:
    return multiply_back(made.codes, made.scale_inv.reshape((1,) * made.codes.ndim), how.fmt, dtype)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _in_q(how: _Cast, x: jax.Array, meta: TensorMeta) -> tuple[jax.Array, jax.Array]:
    return _in_q_fwd(how, x, meta)[0]


def _in_q_fwd(how: _Cast, x: jax.Array, meta: TensorMeta) -> tuple[tuple[jax.Array, jax.Array], Residuals]:
    made = _apply(how, x, meta)
    return (made.values(how.fmt), made.scale_inv), (meta, made.seen)


def _in_q_bwd(how: _Cast, residuals: Residuals, _: object) -> tuple[None, TensorMeta]:
    return None, _next(how, *residuals)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _in_qdq(how: _Cast, x: jax.Array, meta: TensorMeta) -> jax.Array:
    return _in_qdq_fwd(how, x, meta)[0]


def _in_qdq_fwd(how: _Cast, x: jax.Array, meta: TensorMeta) -> tuple[jax.Array, Residuals]:
    made = _apply(how, x, meta)
    return _back(how, made, x.dtype), (meta, made.seen)


def _in_qdq_bwd(how: _Cast, residuals: Residuals, g: jax.Array) -> tuple[jax.Array, TensorMeta]:
    return g, _next(how, *residuals)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _out_qdq(how: _Cast, y: jax.Array, meta: TensorMeta) -> jax.Array:
    return y


def _out_qdq_fwd(how: _Cast, y: jax.Array, meta: TensorMeta) -> tuple[jax.Array, TensorMeta]:
    # Nothing is cast forward, so the state itself goes to the backward rule, which casts with it.
    return y, meta


def _out_qdq_bwd(how: _Cast, meta: TensorMeta, g: jax.Array) -> tuple[jax.Array, TensorMeta]:
    made = _apply(how, g, meta)
    return _back(how, made, g.dtype), _next(how, meta, made.seen)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _out_dq(dtype: np.dtype, y: jax.Array, lhs_scale: jax.Array, rhs_scale: jax.Array) -> jax.Array:
    return (y.astype(jnp.float32) * (lhs_scale * rhs_scale)).astype(dtype)


def _out_dq_fwd(
    dtype: np.dtype, y: jax.Array, lhs_scale: jax.Array, rhs_scale: jax.Array
) -> tuple[jax.Array, jax.Array]:
    # Residuals must be arrays: an empty one carries the dtype of `y`, which its gradient must have.
    return _out_dq(dtype, y, lhs_scale, rhs_scale), jnp.zeros((0,), y.dtype)


def _out_dq_bwd(dtype: np.dtype, like: jax.Array, g: jax.Array) -> tuple[jax.Array, None, None]:
    return g.astype(like.dtype), None, None


_in_q.defvjp(_in_q_fwd, _in_q_bwd)
_in_qdq.defvjp(_in_qdq_fwd, _in_qdq_bwd)
_out_qdq.defvjp(_out_qdq_fwd, _out_qdq_bwd)
_out_dq.defvjp(_out_dq_fwd, _out_dq_bwd)
