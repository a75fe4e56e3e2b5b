"""`fp8_all_gather`: sharded parameters gathered as FP8 codes, one byte per element, with one scale for all shards.

The codes are gathered as uint8, because XLA on CPUs widens a float8 all-gather to 16 bits. The gradient goes back in
the parameter's own dtype.
"""

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import ArrayLike

from fp8_common import Fp8Error
from fp8_common.jax import amax, amax_to_scale, reciprocal
from fp8_common.jax.arrays import float_key
from fp8_common.jax.casts import cast
from fp8_jax_owg._bits import from_bits
from fp8_jax_owg._casting import Seen, State, computed_once, nan_unless, next_state
from fp8_jax_owg._dot import as_operand
from fp8_jax_owg._first_order import first_order_only
from fp8_jax_owg._meshes import refuse_explicit_axes
from fp8_jax_owg._meta import read_tensor_meta
from fp8_jax_owg._parameter import Fp8Param
from fp8_jax_owg._recipes import ScalingChoice, as_scaling
from fp8_jax_owg._scaling import CurrentScaling, DelayedScaling, Scaling, format_of
from fp8_jax_owg.observation import checked_scale

AxisNames = str | Sequence[str]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Gather:
    """What is static about a gather: the mesh axis of a `shard_map`, or the shardings before and after."""

    axis_name: str | tuple[str, ...] | None
    axis: int
    sharded: NamedSharding | None = None
    gathered: NamedSharding | None = None
    scaling: Scaling = dataclasses.field(default_factory=CurrentScaling)

    def all_gather(self, codes: jax.Array) -> jax.Array:
        """Gather uint8 codes."""
        if self.axis_name is not None:
            return lax.all_gather(codes, self.axis_name, axis=self.axis, tiled=True)
        # Both constraints and the barrier: without them the partitioner may gather before the cast.
        codes = lax.optimization_barrier(lax.with_sharding_constraint(codes, self.sharded))
        return lax.with_sharding_constraint(codes, self.gathered)

    def reduce(self, g: jax.Array) -> jax.Array:
        """Bring the gradient of the whole parameter back to the shards."""
        if self.axis_name is not None:
            return lax.psum_scatter(g, self.axis_name, scatter_dimension=self.axis, tiled=True)
        return lax.with_sharding_constraint(g, self.sharded)

    def maximum(self, amax: jax.Array) -> jax.Array:
        """Return the amax of all shards."""
        if self.axis_name is None:
            # Under automatic sharding it is that of the whole array already: the partitioner adds the all-reduce.
            return amax
        # As integers: a MAX of floats may lose a NaN, and takes subnormals for zero where XLA flushes them.
        return from_bits(lax.pmax(float_key(amax), self.axis_name))


def fp8_all_gather(
    x: ArrayLike,
    axis_name: AxisNames | None = None,
    *,
    axis: int = 0,
    sharding: NamedSharding | None = None,
    gathered: NamedSharding | None = None,
    scale: jax.Array | None = None,
    amax_history: jax.Array | None = None,
    scaling: ScalingChoice | None = None,
) -> Fp8Param:
    """Cast a sharded parameter to E4M3 and gather it as one byte per element.

    Every device casts its shard with a scale that all share, so the result is bit for bit that of gathering first
    and casting then. Inside a `shard_map` name the mesh axis; under automatic sharding give the sharding.

    Args:
        x: float32, bfloat16 or float16: the shard, or (with `sharding`) the whole array.
        axis_name: The mesh axis, or axes, of the `shard_map`.
        axis: The dimension that is sharded, for `axis_name`.
        sharding: How the array is sharded, for automatic sharding.
        gathered: How it is sharded afterwards; None is not at all.
        scale: float32 (1,), the stored `kernel_scale`, for delayed scaling.
        amax_history: float32 (length,), the stored `kernel_amax_history`. Both get their next value as gradient.
        scaling: The rule; None is `DelayedScaling()` with a history, else `CurrentScaling()`.

    Returns:
        The whole parameter, for the `rhs` of `fp8_dot_general` and `fp8_einsum`. The gradient of `x` is reduced over
        the shards in the dtype of `x`.

    Raises:
        Fp8Error: Neither or both of `axis_name` and `sharding` are given, scale and history do not come together, or
            scales per row were asked for.
    """
    if (axis_name is None) == (sharding is None):
        raise Fp8Error("fp8_all_gather needs axis_name inside a shard_map, or sharding under automatic sharding.")
    if (scale is None) != (amax_history is None):
        raise Fp8Error("fp8_all_gather needs scale and amax_history together, for delayed scaling.")
    array = as_operand(x, "x")
    refuse_explicit_axes("fp8_all_gather", array)
    state: State = {}
    if scale is not None and amax_history is not None:
        state = {"kernel": read_tensor_meta(scale, amax_history, "kernel")}
    how = _Gather(
        axis_name=axis_name if axis_name is None or isinstance(axis_name, str) else tuple(axis_name),
        axis=axis,
        sharded=sharding,
        # `PartitionSpec()` replicates: every device has the whole parameter.
        gathered=gathered or (sharding and NamedSharding(sharding.mesh, PartitionSpec())),
        scaling=_matching(scaling, bool(state)),
    )
    return _gather(how, array, state)


def _matching(scaling: ScalingChoice | None, delayed: bool) -> Scaling:
    scaling = as_scaling(scaling or (DelayedScaling() if delayed else CurrentScaling()))
    if isinstance(scaling, DelayedScaling) != delayed:
        raise Fp8Error("DelayedScaling needs scale and amax_history, and CurrentScaling takes none.")
    if isinstance(scaling, CurrentScaling) and scaling.granularity == "row":
        raise Fp8Error('fp8_all_gather has one scale per parameter: use CurrentScaling(granularity="tensor").')
    return scaling


class _Residuals(NamedTuple):
    seen: Seen
    state: State


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gather(how: _Gather, x: jax.Array, state: State) -> Fp8Param:
    return _gather_fwd(how, x, state)[0]


def _gather_fwd(how: _Gather, x: jax.Array, state: State) -> tuple[Fp8Param, _Residuals]:
    x = first_order_only(x)
    fmt = format_of("kernel", how.scaling)
    # Before the gather, from the shards: delayed scaling records it, current scaling needs it for a scale that all
    # share.
    greatest = how.maximum(amax(x))
    if state:
        (scale,), (scale_inv,), sound = checked_scale(*state["kernel"], fmt, how.scaling.policy)
    else:
        scale = amax_to_scale(greatest, fmt, how.scaling.policy)
        scale_inv, sound = reciprocal(scale), None
    scale, scale_inv = computed_once(scale, scale_inv)
    codes = how.all_gather(lax.bitcast_convert_type(cast(x, scale, fmt), jnp.uint8))
    data = lax.bitcast_convert_type(codes, fmt.numpy_dtype)
    factor = scale_inv if sound is None else nan_unless(sound, scale_inv)
    # The third is there for its shape and dtype, which its cotangent must have; nothing reads it, so XLA leaves it out.
    made = Fp8Param(data, factor, data.astype(x.dtype))
    return made, _Residuals(Seen(greatest, scale_inv), state)


def _gather_bwd(how: _Gather, residuals: _Residuals, g: Fp8Param) -> tuple[jax.Array, State]:
    gradient = how.reduce(first_order_only(g.gradient))
    return gradient, next_state(residuals.state, {"kernel": residuals.seen})


_gather.defvjp(_gather_fwd, _gather_bwd)
