"""The cast of one operand of a product: its scale from its state, or from itself if it has none."""

from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fp8_common import Format, ScalePolicy
from fp8_common.jax import amax, amax_to_scale
from fp8_common.jax.arithmetic import divide_nearest
from fp8_common.jax.casts import cast as cast_tensor
from fp8_common.jax.casts import cast_slices, cast_with_amax
from fp8_jax_owg._bits import from_bits, to_bits
from fp8_jax_owg._meta import TensorMeta
from fp8_jax_owg._scaling import CurrentScaling, DelayedScaling, Scaling, Tensor, format_of
from fp8_jax_owg._sharing import like
from fp8_jax_owg.observation import checked_scale, observe

NAN_BITS = np.int32(0x7FC00000)
"""Put where a NaN belongs as bits, so that `jax_debug_nans` stops at none that was not there."""

State = dict[Tensor, TensorMeta]
"""The state of each tensor of a product; empty for current scaling."""


class Seen(NamedTuple):
    """What a cast leaves for the next value of the state.

    Attributes:
        amax: float32 scalar, what was observed.
        scale_inv: float32 scalar, the dequantization scale that was used.
    """

    amax: jax.Array
    scale_inv: jax.Array


class Operand(NamedTuple):
    """One operand of a product in FP8, as it is saved for the backward pass.

    Attributes:
        codes: uint8, shape of the array. Not of the native dtype: what `jax.checkpoint` saves of a float8 dtype it
            rounds to fewer exponents than E4M3 has, and XLA on CPUs copies bytes faster when loops stack them.
        scale_inv: float32, scalar or with the summed dimensions of length 1; multiplies values back. NaN where the
            state is none that a step can leave, so that the product is not finite either.
        seen: What delayed scaling observed; None for current scaling.
    """

    codes: jax.Array
    scale_inv: jax.Array
    seen: Seen | None

    def values(self, fmt: Format) -> jax.Array:
        """Return the codes in the native dtype of their format."""
        return lax.bitcast_convert_type(self.codes, fmt.numpy_dtype)


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
    # Nothing is another mesh for JAX than an empty one, under which it runs forward rules: each cast would be traced
    # and lowered twice.
    with jax.sharding.use_abstract_mesh(jax.sharding.get_abstract_mesh()):
        if isinstance(scaling, DelayedScaling):
            return _cast_delayed(x, state[tensor], fmt=fmt, policy=scaling.policy)
        return _cast_current(x, axes=axes if keeps_operands(scaling) else None, fmt=fmt, policy=scaling.policy)


# Functions of their own in the traced program, so that products of equal shapes are traced and lowered once.
@partial(jax.jit, static_argnames=("fmt", "policy"))
def _cast_delayed(x: jax.Array, meta: TensorMeta, *, fmt: Format, policy: ScalePolicy) -> Operand:
    scale, scale_inv, factor = _delayed_scales(meta, fmt=fmt, policy=policy)
    # The amax of this step takes no part in it: it is observed for later steps.
    data, greatest = cast_with_amax(x, scale, fmt)
    return Operand(lax.bitcast_convert_type(data, jnp.uint8), factor, Seen(like(greatest, meta.history), scale_inv))


# Of its own, because it is the same for operands of every shape.
@partial(jax.jit, static_argnames=("fmt", "policy"))
def _delayed_scales(meta: TensorMeta, *, fmt: Format, policy: ScalePolicy) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return float32 scalars: the scale into FP8, the one back, and what products are multiplied by."""
    used, used_inv, sound = checked_scale(meta.scale, meta.history, fmt, policy)
    scale, scale_inv = computed_once(used[0], used_inv[0])
    # a history that no step can have left is not computed with in silence
    return scale, scale_inv, nan_unless(sound, scale_inv)


@partial(jax.jit, static_argnames=("axes", "fmt", "policy"))
def _cast_current(x: jax.Array, *, axes: tuple[int, ...] | None, fmt: Format, policy: ScalePolicy) -> Operand:
    # The policies of `CurrentScaling` limit scales to [2^-126, 2^100]. Their reciprocals are normal numbers, so one
    # division is exact here; `fp8_common.jax.reciprocal` spends more operations on the others.
    if axes is not None:
        data, scale = cast_slices(x, fmt, axes, policy)
        return Operand(lax.bitcast_convert_type(data, jnp.uint8), divide_nearest(1.0, scale), None)
    scale = amax_to_scale(amax(x), fmt, policy)
    scale, scale_inv = computed_once(scale, divide_nearest(1.0, scale))
    return Operand(lax.bitcast_convert_type(cast_tensor(x, scale, fmt), jnp.uint8), scale_inv, None)


def nan_unless(sound: jax.Array, scale_inv: jax.Array) -> jax.Array:
    """Return the dequantization scale, NaN where the state that it comes from is not sound."""
    bits = to_bits(scale_inv)
    return from_bits(lax.select(jnp.broadcast_to(sound, bits.shape), bits, lax.full_like(bits, NAN_BITS)))


def computed_once(scale: jax.Array, scale_inv: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return both float32 scalars, from memory.

    XLA on CPUs drops barriers before it fuses, and would compute the scale, dozens of operations, again for every
    element of every array that it is used for. It writes an array of two before it reads from it.
    """
    pair = lax.optimization_barrier(jnp.stack([scale, scale_inv]))
    return pair[0], pair[1]


def keeps_operands(scaling: Scaling) -> bool:
    """Return whether the backward pass needs the uncast operands, because its rows are others."""
    return isinstance(scaling, CurrentScaling) and scaling.granularity == "row"


def next_state(state: State, seen: Mapping[Tensor, Seen | None]) -> State:
    """Return the next value of every leaf, as its gradient carries it.

    Args:
        state: The leaves as they were before the step.
        seen: What the casts of these tensors left.
    """
    histories = {tensor: meta.history for tensor, meta in state.items()}
    return _observe_all(histories, {tensor: seen[tensor] for tensor in state}) if state else {}


@jax.jit
def _observe_all(histories: dict[Tensor, jax.Array], seen: dict[Tensor, Seen]) -> State:
    # Behind a barrier, or XLA takes what belongs to the histories out of a loop and keeps copies of each.
    histories, found = lax.optimization_barrier((histories, seen))
    return {tensor: TensorMeta(*_observe(found[tensor], history)) for tensor, history in histories.items()}


@jax.jit
def _observe(seen: Seen, history: jax.Array) -> tuple[jax.Array, jax.Array]:
    return observe(seen.amax, seen.scale_inv[None], history)
