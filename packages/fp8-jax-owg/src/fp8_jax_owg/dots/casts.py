"""The casts that a layer of one's own is built from: quantize alone, or quantize and dequantize.

Every function that takes a scale and an amax history observes what it casts, as matmuls do.
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
from fp8_jax_owg.dots.operand import as_codes, as_operand, cast_and_observe
from fp8_jax_owg.scaling import DelayedScaling, ScalingChoice, Tensor, as_scaling, format_of
from fp8_jax_owg.state.first_order import first_order_only
from fp8_jax_owg.state.leaves import like
from fp8_jax_owg.state.live import as_live, observation, scales_of
from fp8_jax_owg.state.pairs import Pair


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Cast:
    """What is static about a cast."""

    scaling: DelayedScaling
    tensor: Tensor

    @property
    def fmt(self) -> Format:
        return format_of(self.tensor, self.scaling)

    def apply(self, x: jax.Array, live: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return native values, the scale back, and what the live leaf observes."""
        (into,), (back,) = scales_of([live], [self.fmt], self.scaling.policy)
        values, amax = cast_and_observe(first_order_only(x), into, self.fmt)
        return values, back, observation(like(amax, live), back, live)

    def round(self, x: jax.Array, live: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return `x` as the format represents it, and what the live leaf observes."""
        values, back, seen = self.apply(x, live)
        return multiply_back(as_codes(values), back.reshape((1,) * x.ndim), self.fmt, x.dtype), seen


def in_q(
    x: ArrayLike, scale: jax.Array, amax_history: jax.Array, scaling: ScalingChoice | None = None
) -> tuple[jax.Array, jax.Array]:
    """Quantize an input of a matmul, and observe it.

    Args:
        x: float16, bfloat16 or float32. It gets a zero gradient: codes have none, the matmul gives it.
        scale: float32 (1,), the stored scale.
        amax_history: float32 (length,).
        scaling: `DelayedScaling`, or a recipe with delayed scaling; None is `DelayedScaling()`.

    Returns:
        (E4M3 array of the shape of `x`, float32 scalar that multiplies it back).

    Raises:
        Fp8Error: Unsupported dtypes or shapes.
    """
    live = as_live(Pair(scale, amax_history), "An input's")
    return _in_q(_delayed(scaling, "input"), vary_alike(as_operand(x, "x"), live), live)


def in_qdq(x: ArrayLike, scale: jax.Array, amax_history: jax.Array, scaling: ScalingChoice | None = None) -> jax.Array:
    """Return `x` as E4M3 represents it, and observe it; the gradient of `x` passes unchanged.

    Arguments and errors are those of `in_q`; the result has the shape and dtype of `x`.
    """
    live = as_live(Pair(scale, amax_history), "An input's")
    return _in_qdq(_delayed(scaling, "input"), vary_alike(as_operand(x, "x"), live), live)


def out_qdq(y: ArrayLike, scale: jax.Array, amax_history: jax.Array, scaling: ScalingChoice | None = None) -> jax.Array:
    """Return `y`; its gradient passes as the gradient format represents it, and is observed.

    Arguments and errors are those of `in_q`.
    """
    live = as_live(Pair(scale, amax_history), "An output gradient's")
    return _out_qdq(_delayed(scaling, "output_grad"), vary_alike(as_operand(y, "y"), live), live)


def out_dq(y: ArrayLike, lhs_scale: jax.Array, rhs_scale: jax.Array, dtype: DTypeLike = jnp.float32) -> jax.Array:
    """Scale the matmul of two FP8 arrays back; the gradient of `y` passes unscaled, the scales get none.

    The gradient belongs to the values that were cast, not to their codes: it goes where `y` came from.

    Args:
        y: float32, float16 or bfloat16: the matmul of the codes.
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


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _in_q(how: _Cast, x: jax.Array, live: jax.Array) -> tuple[jax.Array, jax.Array]:
    return _in_q_fwd(how, x, live)[0]


def _in_q_fwd(how: _Cast, x: jax.Array, live: jax.Array) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
    values, back, seen = how.apply(x, live)
    return (values, back), seen


def _in_q_bwd(how: _Cast, seen: jax.Array, _: object) -> tuple[None, jax.Array]:
    return None, seen


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _in_qdq(how: _Cast, x: jax.Array, live: jax.Array) -> jax.Array:
    return how.round(x, live)[0]


def _in_qdq_bwd(how: _Cast, seen: jax.Array, g: jax.Array) -> tuple[jax.Array, jax.Array]:
    return g, seen


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _out_qdq(how: _Cast, y: jax.Array, live: jax.Array) -> jax.Array:
    return y


def _out_qdq_fwd(how: _Cast, y: jax.Array, live: jax.Array) -> tuple[jax.Array, jax.Array]:
    # Nothing is cast forward, so the state itself goes to the backward rule, which casts with it.
    return y, live


def _out_qdq_bwd(how: _Cast, live: jax.Array, g: jax.Array) -> tuple[jax.Array, jax.Array]:
    return how.round(g, live)


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
_in_qdq.defvjp(_Cast.round, _in_qdq_bwd)
_out_qdq.defvjp(_out_qdq_fwd, _out_qdq_bwd)
_out_dq.defvjp(_out_dq_fwd, _out_dq_bwd)
