"""The cast of one operand of a product: its scale from its state, or from itself if it has none."""

from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from fp8_common.jax import amax, amax_to_scale, quantize, reciprocal
from fp8_jax_owg._meta import TensorMeta
from fp8_jax_owg._scaling import CurrentScaling, DelayedScaling, Scaling, Tensor, format_of
from fp8_jax_owg.observation import observe, observed_amax, used_scale

State = dict[Tensor, TensorMeta]
"""The state of each tensor of a product; empty for current scaling."""


class Seen(NamedTuple):
    """What a cast leaves for the next value of the state.

    Attributes:
        amax: float32 scalar, what was observed.
        scale_inv: float32 scalar, the dequantization scale that was used.
    """

    amax: jax.Array | None
    scale_inv: jax.Array


class Operand(NamedTuple):
    """One operand of a product in FP8.

    Attributes:
        data: The native float8 dtype, shape of the array.
        scale_inv: float32, scalar or with the summed dimensions of length 1; multiplies `data` back.
        amax: float32 scalar, what delayed scaling observed; None for current scaling.
    """

    data: jax.Array
    scale_inv: jax.Array
    amax: jax.Array | None

    @property
    def seen(self) -> Seen:
        """What the next state needs of this cast."""
        return Seen(self.amax, self.scale_inv)


def cast(x: jax.Array, tensor: Tensor, state: State, scaling: Scaling, axes: tuple[int, ...] = ()) -> Operand:
    """Cast an operand.

    Args:
        x: float16, bfloat16 or float32.
        tensor: Which operand it is; decides its format.
        state: Holds its state for delayed scaling.
        scaling: The rule.
        axes: Dimensions that the product sums over, for scales per row.
    """
    fmt = format_of(tensor, scaling)
    if isinstance(scaling, DelayedScaling):
        meta = state[tensor]
        used = used_scale(meta.scale, meta.history, fmt, scaling.policy)
        scale, scale_inv = computed_once(used[0][0], used[1][0])
        return Operand(quantize(x, scale, fmt), scale_inv, observed_amax(x, meta.history))
    by_row = keeps_operands(scaling)
    scale = amax_to_scale(amax(x, axis=axes if by_row else None, keepdims=by_row), fmt, scaling.policy)
    scale_inv = reciprocal(scale)
    if not by_row:
        scale, scale_inv = computed_once(scale, scale_inv)
    return Operand(quantize(x, scale, fmt), scale_inv, None)


def computed_once(scale: jax.Array, scale_inv: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return both float32 scalars, from memory.

    XLA on CPUs drops barriers before it fuses, and would compute the scale, about a hundred operations, again for
    every element of every array that it is used for. It writes an array of two before it reads from it.
    """
    pair = lax.optimization_barrier(jnp.stack([scale, scale_inv]))
    return pair[0], pair[1]


def keeps_operands(scaling: Scaling) -> bool:
    """Return whether the backward pass needs the uncast operands, because its rows are others."""
    return isinstance(scaling, CurrentScaling) and scaling.granularity == "row"


def next_state(state: State, seen: Mapping[Tensor, Seen]) -> State:
    """Return the next value of every leaf, as its gradient carries it.

    Args:
        state: The leaves as they were before the step.
        seen: What the casts of these tensors left.
    """
    histories = {tensor: meta.history for tensor, meta in state.items()}
    # Behind a barrier, or XLA takes what belongs to the histories out of a loop and keeps copies of each.
    histories, found = lax.optimization_barrier((histories, {tensor: seen[tensor] for tensor in state}))
    return {
        tensor: TensorMeta(*observe(found[tensor].amax, found[tensor].scale_inv.reshape(1), history))
        for tensor, history in histories.items()
    }
