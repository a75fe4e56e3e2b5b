"""`fp8_all_gather`: sharded parameters gathered as FP8 codes, one byte per element, with one scale for all shards.

The codes are gathered as uint8, because XLA on CPUs widens a float8 all-gather to 16 bits. The gradient goes back in
the parameter's own dtype; where `gradients` is given, as codes with a scale for each block, added in float32.
"""

import dataclasses
from functools import partial
from typing import NamedTuple

import jax
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import ArrayLike

from fp8_common import Fp8Error, GradientCompression
from fp8_common.jax import amax, amax_to_scale, reciprocal
from fp8_common.jax.plugin import dispatch, float_key
from fp8_jax_owg._bits import from_bits
from fp8_jax_owg._casting import Seen, State, computed_once, nan_unless, next_state
from fp8_jax_owg._dot import as_operand
from fp8_jax_owg._first_order import first_order_only
from fp8_jax_owg._gradients import AxisNames, as_names, compressed_psum_scatter, supported
from fp8_jax_owg._meshes import refuse_explicit_axes
from fp8_jax_owg._meta import read_tensor_meta
from fp8_jax_owg._parameter import Fp8Param
from fp8_jax_owg._recipes import ScalingChoice, as_scaling
from fp8_jax_owg._scaling import CurrentScaling, DelayedScaling, Scaling, format_of, refuse_channels
from fp8_jax_owg.observation import checked_scale


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Gather:
    """What is static about a gather: the mesh axis of a `shard_map`, or the shardings before and after."""

    axis_name: str | tuple[str, ...] | None
    axis: int
    sharded: NamedSharding | None = None
    gathered: NamedSharding | None = None
    scaling: Scaling = dataclasses.field(default_factory=CurrentScaling)
    scale_axes: tuple[str, ...] = ()
    gradients: GradientCompression | None = None

    def all_gather(self, codes: jax.Array) -> jax.Array:
        """Gather uint8 codes."""
        if self.axis_name is not None:
            return lax.all_gather(codes, self.axis_name, axis=self.axis, tiled=True)
        # Both constraints and the barrier: without them the partitioner may gather before the cast.
        codes = lax.optimization_barrier(lax.with_sharding_constraint(codes, self.sharded))
        return lax.with_sharding_constraint(codes, self.gathered)

    def reduce(self, g: jax.Array) -> jax.Array:
        """Bring the gradient of the whole parameter back to the shards."""
        if self.axis_name is not None and self.gradients is not None:
            return compressed_psum_scatter(g, self.axis_name, axis=self.axis, compression=self.gradients)
        if self.axis_name is not None:
            return lax.psum_scatter(g, self.axis_name, scatter_dimension=self.axis, tiled=True)
        return lax.with_sharding_constraint(g, self.sharded)

    def maximum(self, amax: jax.Array) -> jax.Array:
        """Return the amax of all shards."""
        if self.axis_name is None:
            # Under automatic sharding it is that of the whole array already: the partitioner adds the all-reduce.
            return amax
        # As integers: a MAX of floats may lose a NaN, and takes subnormals for zero where XLA flushes them.
        names = (self.axis_name,) if isinstance(self.axis_name, str) else self.axis_name
        return from_bits(lax.pmax(float_key(amax), (*names, *self.scale_axes)))


def fp8_all_gather(
    x: ArrayLike | Fp8Param,
    axis_name: AxisNames | None = None,
    *,
    axis: int = 0,
    sharding: NamedSharding | None = None,
    gathered: NamedSharding | None = None,
    scale: jax.Array | None = None,
    amax_history: jax.Array | None = None,
    scaling: ScalingChoice | None = None,
    scale_axes: AxisNames = (),
    gradients: GradientCompression | None = None,
) -> Fp8Param:
    """Cast a sharded parameter to E4M3 and gather it as one byte per element.

    Every device casts its shard with a scale that all share, so the result is bit for bit that of gathering first
    and casting then. Inside a `shard_map` name the mesh axis; under automatic sharding give the sharding.

    A parameter that is sharded over nodes and over the devices of a node is gathered in two steps: once for each
    optimizer step over the nodes, with the others as `scale_axes`, and then, wherever it is used, what that returned
    over the devices of a node. Codes cross nodes once for each step, and gradients too.

    Args:
        x: float32, bfloat16 or float16: the shard, or (with `sharding`) the whole array. Or what an earlier call
            returned, whose codes are gathered as they are.
        axis_name: The mesh axis, or axes, of the `shard_map`.
        axis: The dimension that is sharded, for `axis_name`.
        sharding: How the array is sharded, for automatic sharding.
        gathered: How it is sharded afterwards; None is not at all.
        scale: float32 (1,), the stored `kernel_scale`, for delayed scaling.
        amax_history: float32 (length,), the stored `kernel_amax_history`. Both get their next value as gradient.
        scaling: The rule; None is `DelayedScaling()` with a history, else `CurrentScaling()`.
        scale_axes: Further mesh axes over which the parameter is sharded, and is gathered later: one scale for all.
        gradients: Send the gradient over `axis_name` as FP8 codes too, see `compressed_psum_scatter`; None sends the
            dtype of `x`.

    Returns:
        The whole parameter, for the `rhs` of `fp8_dot_general` and `fp8_einsum`. The gradient of `x` is reduced over
        the shards in the dtype of `x`.

    Raises:
        Fp8Error: Neither or both of `axis_name` and `sharding` are given, what belongs to `axis_name` is given with
            `sharding`, scale and history do not come together, scales per row were asked for, or `x` was cast and is
            to be cast again.
        Fp8UnsupportedError: `gradients` asks for more than rounding to nearest.
    """
    if (axis_name is None) == (sharding is None):
        raise Fp8Error("fp8_all_gather needs axis_name inside a shard_map, or sharding under automatic sharding.")
    if axis_name is None and (scale_axes or gradients is not None):
        raise Fp8Error(
            "scale_axes and gradients of fp8_all_gather need axis_name, inside a shard_map: under automatic sharding "
            "the partitioner chooses the collectives."
        )
    if (scale is None) != (amax_history is None):
        raise Fp8Error("fp8_all_gather needs scale and amax_history together, for delayed scaling.")
    how = _Gather(
        axis_name=None if axis_name is None else as_names(axis_name),
        axis=axis,
        sharded=sharding,
        # `PartitionSpec()` replicates: every device has the whole parameter.
        gathered=gathered or (sharding and NamedSharding(sharding.mesh, PartitionSpec())),
        gradients=None if gradients is None else supported(gradients),
    )
    if isinstance(x, Fp8Param):
        if scaling is not None or scale is not None or scale_axes:
            raise Fp8Error("A parameter that was cast already keeps its scale: gather it without scaling and scale.")
        return _gather_codes(how, x)
    array = as_operand(x, "x")
    refuse_explicit_axes("fp8_all_gather", array)
    state: State = {}
    if scale is not None and amax_history is not None:
        state = {"kernel": read_tensor_meta(scale, amax_history, "kernel")}
    further = (scale_axes,) if isinstance(scale_axes, str) else tuple(scale_axes)
    return _gather(dataclasses.replace(how, scaling=_matching(scaling, bool(state)), scale_axes=further), array, state)


def _matching(scaling: ScalingChoice | None, delayed: bool) -> Scaling:
    scaling = as_scaling(scaling or (DelayedScaling() if delayed else CurrentScaling()))
    if isinstance(scaling, DelayedScaling) != delayed:
        raise Fp8Error("DelayedScaling needs scale and amax_history, and CurrentScaling takes none.")
    if isinstance(scaling, CurrentScaling) and scaling.granularity == "row":
        raise Fp8Error('fp8_all_gather has one scale per parameter: use CurrentScaling(granularity="tensor").')
    refuse_channels("fp8_all_gather", scaling)
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
    codes = how.all_gather(dispatch.quantize_to_codes(x, scale, fmt))
    data = lax.bitcast_convert_type(codes, fmt.numpy_dtype)
    factor = scale_inv if sound is None else nan_unless(sound, scale_inv)
    # The third is there for its shape and dtype, which its cotangent must have; nothing reads it, so XLA leaves it out.
    made = Fp8Param(data, factor, data.astype(x.dtype))
    return made, _Residuals(Seen(greatest, scale_inv), state)


def _gather_bwd(how: _Gather, residuals: _Residuals, g: Fp8Param) -> tuple[jax.Array, State]:
    gradient = how.reduce(first_order_only(g.gradient))
    return gradient, next_state(residuals.state, {"kernel": residuals.seen})


_gather.defvjp(_gather_fwd, _gather_bwd)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gather_codes(how: _Gather, x: Fp8Param) -> Fp8Param:
    fmt = x.data.dtype
    data = lax.bitcast_convert_type(how.all_gather(lax.bitcast_convert_type(x.data, np.uint8)), fmt)
    return Fp8Param(data, x.scale_inv, data.astype(x.gradient.dtype))


def _gather_codes_fwd(how: _Gather, x: Fp8Param) -> tuple[Fp8Param, None]:
    return _gather_codes(how, x), None


def _gather_codes_bwd(how: _Gather, _: None, g: Fp8Param) -> tuple[Fp8Param]:
    gradient = how.reduce(first_order_only(g.gradient))
    return (Fp8Param(None, None, gradient),)  # pyrefly: ignore[bad-argument-type]  (custom_vjp's zeros)


_gather_codes.defvjp(_gather_codes_fwd, _gather_codes_bwd)
