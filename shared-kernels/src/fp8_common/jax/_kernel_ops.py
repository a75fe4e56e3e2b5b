"""JAX primitives for operations with kernels: each with its reference, its plan, its batching and its sharding.

On every platform but CUDA, and for shapes without a kernel, an operation lowers to the reference in this package, so
programs are portable and results the same bits. Inside, each is two primitives: the outer one is what `vmap` and the
partitioners see, the inner one is the call on one device's shard.
"""

import dataclasses
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import ShapedArray
from jax.experimental.custom_partitioning import custom_partitioning
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir
from jax.sharding import NamedSharding, PartitionSpec, get_abstract_mesh

from fp8_common._hardware import has_kernels
from fp8_common.jax import _compat as compat
from fp8_common.jax import _triton_bridge as triton_bridge
from fp8_common.jax._kernel_layout import Layout

Arrays = tuple[jax.Array, ...]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class KernelOp:
    """One operation.

    Attributes:
        name: Name of its primitives.
        reference: (*arrays, **params) -> results; jnp code that defines them.
        plan: (`fp8_common._kernels`, *shapes with dtype, **params) -> launch, or None where there is no kernel.
        layout: How its results depend on dimensions of its first operand.
    """

    name: str
    reference: Callable[..., Arrays]
    plan: Callable[..., Any]
    layout: Layout


def bindable(op: KernelOp) -> Callable[..., Sequence[jax.Array]]:
    """Register the primitives of an operation and return the function that applies it."""
    inner, outer = Primitive(f"{op.name}_call"), Primitive(op.name)
    for primitive in (inner, outer):
        primitive.multiple_results = True
        # `p=primitive`: the function is called after the loop, when the variable is the last primitive.
        primitive.def_impl(lambda *x, p=primitive, **params: _jitted(p, **params)(*x))
        primitive.def_abstract_eval(lambda *avals, **params: _abstract(op, avals, params))
        batching.primitive_batchers[primitive] = lambda x, dims, p=primitive, **params: _batch(op, p, x, dims, params)
    # For every platform; the next line replaces it for CUDA.
    mlir.register_lowering(inner, mlir.lower_fun(op.reference, multiple_results=True))
    mlir.register_lowering(inner, lambda ctx, *x, **params: _lower_cuda(op, ctx, x, params), platform="cuda")
    mlir.register_lowering(outer, lambda ctx, *x, **params: _lower_partitioned(op, inner, ctx, x, params))
    # It becomes a custom partitioning.
    compat.lower_with_devices(outer)
    return lambda *x, **params: (inner if _is_manual() else outer).bind(*compat.vary_alike(x), **params)


@cache
def _jitted(primitive: Primitive, **params: Any) -> Callable[..., Sequence[jax.Array]]:
    """Return what runs a primitive outside of jit; kept, so that it is compiled once."""
    # Kept by primitive and parameters, which are formats, policies and other values with a hash.
    return jax.jit(lambda *x: primitive.bind(*x, **params))


def _sharding(mesh: Any, spec: Sequence[Any]) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec(*spec))


def _is_manual() -> bool:
    """Return whether shard_map hands out shards already, so that there is nothing to partition."""
    return bool(get_abstract_mesh().manual_axes)


def _abstract(op: KernelOp, avals: Sequence[Any], params: dict[str, Any]) -> list[ShapedArray]:
    inputs = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in avals]
    results = jax.eval_shape(lambda *x: op.reference(*x, **params), *inputs)
    # Results vary along the axes of shard_map that an operand varies along; `vary_alike` has made all operands alike.
    most = max(avals, key=lambda aval: len(compat.varying_axes(aval)))
    return [compat.typed_like(most, r.shape, r.dtype) for r in results]


def _lower_cuda(op: KernelOp, ctx: Any, operands: Sequence[Any], params: dict[str, Any]) -> Sequence[Any]:
    # The plans are asked for only where kernels can run: they come with the kernels, hence with Triton.
    if triton_bridge.selects_kernels() and has_kernels(params.get("fmt", "e4m3"), params.get("policy")):
        plan = op.plan(triton_bridge.plans(), *ctx.avals_in, **params)
        if plan is not None and plan.grid:
            return triton_bridge.lower_plan(ctx, plan, operands)
    return mlir.lower_fun(op.reference, multiple_results=True)(ctx, *operands, **params)


def _lower_partitioned(
    op: KernelOp, inner: Primitive, ctx: Any, operands: Sequence[Any], params: dict[str, Any]
) -> Sequence[Any]:
    # Known only now, when the program is lowered; the rule for Shardy depends on it.
    devices = getattr(ctx.module_context.axis_context, "num_devices", None) or 1
    apply = mlir.lower_fun(lambda *x: _partitioned(op, inner, x, params, devices), multiple_results=True)
    return apply(ctx, *operands)


def _batch(
    op: KernelOp, primitive: Primitive, operands: Sequence[jax.Array], dims: Sequence[Any], params: dict[str, Any]
) -> tuple[Sequence[jax.Array], Sequence[int]]:
    """Independent rows take another leading dimension; everything else is batched as jnp code."""
    only_first = dims[0] is not None and all(dim is None for dim in dims[1:])
    if op.layout.batches and only_first and operands[0].ndim > 1:
        results = primitive.bind(jnp.moveaxis(operands[0], dims[0], 0), *operands[1:], **params)
    else:
        results = jax.vmap(lambda *x: op.reference(*x, **params), in_axes=tuple(dims))(*operands)
    return results, [0] * len(results)


def _partitioned(
    op: KernelOp, inner: Primitive, operands: Sequence[jax.Array], params: dict[str, Any], devices: int
) -> Sequence[jax.Array]:
    """Apply the inner primitive to shards, as far as the layout lets dimensions stay sharded."""

    @custom_partitioning
    def apply(*x: jax.Array) -> tuple[jax.Array, ...]:
        return tuple(inner.bind(*x, **params))

    def shardings(mesh: Any, shapes: Sequence[Any]) -> tuple[Any, Any]:
        asked = getattr(shapes[0].sharding, "spec", ())
        spec = op.layout.kept(tuple(asked), shapes[0].shape, dict(mesh.shape))
        given = (spec, *(() for _ in shapes[1:]))
        made = op.layout.specs_of_results(spec)
        here = partial(_sharding, mesh)
        return tuple(map(here, given)), tuple(map(here, made))

    def infer(mesh: Any, shapes: Sequence[Any], results: Sequence[Any]) -> tuple[Any, ...]:
        return shardings(mesh, shapes)[1]

    def partition(mesh: Any, shapes: Sequence[Any], results: Sequence[Any]) -> tuple[Any, ...]:
        given, made = shardings(mesh, shapes)
        axes = op.layout.axes_to_combine(given[0].spec)

        def on_shard(*x: jax.Array) -> tuple[jax.Array, ...]:
            if axes and op.layout.combine:
                return tuple(op.layout.combine(lambda *y: inner.bind(*y, **params), *x, axes=axes, **params))
            return tuple(inner.bind(*x, **params))

        return mesh, on_shard, made, given

    rule = op.layout.shardy_rule([x.shape for x in operands], devices)
    apply.def_partition(partition=partition, infer_sharding_from_operands=infer, **rule)
    return apply(*operands)
