"""`fp8_all_gather`: gathers sharded parameters as FP8 codes with one scale.

The codes are gathered as uint8, because XLA on CPUs widens a float8 all-gather to 16 bits. The gradient is reduced in
the dtype of the parameter.
"""

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import ArrayLike

from fp8_common import Fp8Error
from fp8_common.jax import amax
from fp8_common.jax.casts import cast
from fp8_common.jax.numerics import as_native, float_key, from_bits
from fp8_jax_owg.dots.bilinear import match_state
from fp8_jax_owg.dots.operands import Fp8Param, as_operand, current_scales, refuse_explicit_axes, to_uint8_codes
from fp8_jax_owg.scaling import Scaling, ScalingChoice
from fp8_jax_owg.state.cotangents import first_order_only
from fp8_jax_owg.state.in_loss import observation, scales_of


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Gather:
    """Static settings of a gather.

    Attributes:
        axis_name: Mesh axes of the `shard_map`; None under automatic sharding.
        axis: Sharded dimension, for `axis_name`.
        sharded: Sharding before the gather, under automatic sharding.
        gathered: Sharding after the gather, under automatic sharding.
        scaling: Rule for the scale.
    """

    axis_name: str | tuple[str, ...] | None
    axis: int
    sharded: NamedSharding | None
    gathered: NamedSharding | None
    scaling: Scaling

    def all_gather(self, codes: jax.Array) -> jax.Array:
        """Gather uint8 codes."""
        if self.axis_name is not None:
            return lax.all_gather(codes, self.axis_name, axis=self.axis, tiled=True)
        # Without both constraints and the barrier, the partitioner may gather before the cast.
        codes = lax.optimization_barrier(lax.with_sharding_constraint(codes, self.sharded))
        return lax.with_sharding_constraint(codes, self.gathered)

    def reduce(self, g: jax.Array) -> jax.Array:
        """Reduce the gradient of the whole parameter to the shards."""
        if self.axis_name is not None:
            return lax.psum_scatter(g, self.axis_name, scatter_dimension=self.axis, tiled=True)
        return lax.with_sharding_constraint(g, self.sharded)

    def maximum(self, amax: jax.Array) -> jax.Array:
        """Return the amax of all shards."""
        if self.axis_name is None:
            # Under automatic sharding this is the amax of the whole array: the partitioner adds the all-reduce.
            return amax
        # As integers: a MAX of floats may lose a NaN, and treats subnormals as zero where XLA flushes them.
        return from_bits(lax.pmax(float_key(amax), self.axis_name))


def fp8_all_gather(
    x: ArrayLike,
    axis_name: str | Sequence[str] | None = None,
    *,
    axis: int = 0,
    sharding: NamedSharding | None = None,
    gathered: NamedSharding | None = None,
    scale: jax.Array | None = None,
    amax_history: jax.Array | None = None,
    scaling: ScalingChoice | None = None,
) -> Fp8Param:
    """Cast a sharded parameter to FP8 and gather its codes.

    The gather sends one byte per element. All devices cast their shards with the same scale, so the result equals a
    gather followed by a cast, bit for bit. Inside a `shard_map`, pass `axis_name`; under automatic sharding, pass
    `sharding`.

    Args:
        x: float32, bfloat16 or float16: the shard, or (with `sharding`) the whole array.
        axis_name: Mesh axis, or axes, of the `shard_map`.
        axis: Sharded dimension, for `axis_name`.
        sharding: Sharding of the array, under automatic sharding.
        gathered: Sharding after the gather, under automatic sharding; None replicates.
        scale: float32 (1,), the stored `kernel_scale`, for delayed scaling.
        amax_history: float32 (length,), the stored `kernel_amax_history`, for delayed scaling. As in a matmul, the
            gradients of scale and history are observations.
        scaling: As in `fp8_dot_general`, except that scales per row are not supported. None is `DelayedScaling()` with
            a history, else `CurrentScaling()`.

    Returns:
        The whole parameter, for the `rhs` of `fp8_dot_general` and `fp8_einsum`. The gradient of `x` is reduced over
        the shards in the dtype of `x`.

    Raises:
        Fp8Error: If neither or both of `axis_name` and `sharding` are given, scale and history are not given together,
            the scaling is row-wise, or scaling and history do not match.
        Fp8UnsupportedError: If `x` is sharded over an explicit mesh axis, or JAX requests a second derivative.

    Examples:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> import fp8_jax_owg as owg
        >>> def layer(x, shard):  # on each device
        ...     return owg.fp8_einsum("bi,io->bo", x, owg.fp8_all_gather(shard, "data"))
        >>> batch = jax.sharding.PartitionSpec("data")
        >>> mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
        >>> run = jax.jit(jax.shard_map(layer, mesh=mesh, in_specs=(batch, batch), out_specs=batch))
        >>> round(float(run(jnp.ones((4, 16)), jnp.ones((16, 8)))[0, 0]), 3)
        16.0
    """
    if (axis_name is None) == (sharding is None):
        raise Fp8Error("fp8_all_gather needs axis_name inside a shard_map, or sharding under automatic sharding.")
    if (scale is None) != (amax_history is None):
        raise Fp8Error("fp8_all_gather needs scale and amax_history together, for delayed scaling.")
    array = as_operand(x, "x")
    refuse_explicit_axes("fp8_all_gather", array)
    meta: Any = None if scale is None else {"kernel_scale": scale, "kernel_amax_history": amax_history}
    settings, live = match_state(meta, scaling, ("kernel",))
    if settings.by_row:
        raise Fp8Error('fp8_all_gather has one scale per parameter: use CurrentScaling(granularity="tensor").')
    gather = _Gather(
        axis_name=axis_name if axis_name is None or isinstance(axis_name, str) else tuple(axis_name),
        axis=axis,
        sharded=sharding,
        # `PartitionSpec()` replicates: every device has the whole parameter.
        gathered=gathered or (sharding and NamedSharding(sharding.mesh, PartitionSpec())),
        scaling=settings,
    )
    return _gather(gather, array, live.get("kernel"))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gather(gather: _Gather, x: jax.Array, live: jax.Array | None) -> Fp8Param:
    return _gather_fwd(gather, x, live)[0]


def _gather_fwd(gather: _Gather, x: jax.Array, live: jax.Array | None) -> tuple[Fp8Param, jax.Array | None]:
    x = first_order_only(x)
    fmt = gather.scaling.format_of("kernel")
    # Computed before the gather, from the shards: delayed scaling records it, and current scaling needs it for a scale
    # that all devices share.
    greatest = gather.maximum(amax(x))
    if live is None:
        into, back = current_scales(greatest, fmt, gather.scaling.policy)
        seen = None
    else:
        into, back = scales_of({"kernel": live}, gather.scaling)["kernel"]
        seen = observation(greatest, back, live)
    data = as_native(gather.all_gather(to_uint8_codes(cast(x, into, fmt))), fmt)
    # The third array provides the shape and dtype of its cotangent. Nothing reads its values, so XLA removes it.
    return Fp8Param(data, back, data.astype(x.dtype)), seen


def _gather_bwd(gather: _Gather, seen: jax.Array | None, g: Fp8Param) -> tuple[jax.Array, jax.Array | None]:
    return gather.reduce(first_order_only(g.gradient)), seen


_gather.defvjp(_gather_fwd, _gather_bwd)
