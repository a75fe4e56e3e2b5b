"""Decides which JAX operations have kernels: for each its reference, its plan, and how it batches and shards.

On every platform but CUDA, and for shapes without a kernel, an operation lowers to the reference in this package, so
programs are portable and results the same bits. Inside, each is two primitives: the outer one is what `vmap` and the
partitioners see, the inner one is the call on one device's shard.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax._src import dispatch
from jax.core import ShapedArray
from jax.experimental.custom_partitioning import custom_partitioning
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir
from jax.sharding import NamedSharding, PartitionSpec

from fp8_common.jax import triton_bridge
from fp8_common.launch import LaunchPlan

Arrays = tuple[jax.Array, ...]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class KernelOp:
    """One operation.

    Attributes:
        name: Name of its primitives.
        reference: (*arrays, **params) -> results; jnp code that defines them.
        plan: (*shapes with dtype, **params) -> launch plan, or None where there is no kernel.
        rows: Whether leading dimensions of the first operand are independent rows, which may be batched and sharded.
        whole: Whether the last dimension is independent too: elementwise.
        combine: How partial results of shards combine: (result, mesh axes) -> result; None if they are independent.
    """

    name: str
    reference: Callable[..., Arrays]
    plan: Callable[..., LaunchPlan | None]
    rows: bool = False
    whole: bool = False
    combine: Callable[[jax.Array, tuple[str, ...]], jax.Array] | None = None


def bindable(op: KernelOp) -> Callable[..., Sequence[jax.Array]]:
    """Register the primitives of an operation and return the function that applies it."""
    inner, outer = Primitive(f"{op.name}_call"), Primitive(op.name)
    for primitive in (inner, outer):
        primitive.multiple_results = True
        primitive.def_impl(lambda *x, p=primitive, **params: jax.jit(lambda *y: p.bind(*y, **params))(*x))
        primitive.def_abstract_eval(lambda *avals, **params: _abstract(op, avals, params))
    mlir.register_lowering(inner, mlir.lower_fun(op.reference, multiple_results=True))
    mlir.register_lowering(inner, lambda ctx, *x, **params: _lower_cuda(op, ctx, x, params), platform="cuda")
    mlir.register_lowering(
        outer, mlir.lower_fun(lambda *x, **params: _partitioned(op, inner, x, params), multiple_results=True)
    )
    # It becomes a custom partitioning, which is lowered for known devices only; jax has no public way to say so.
    dispatch.prim_requires_devices_during_lowering.add(outer)
    batching.primitive_batchers[outer] = lambda x, dims, **params: _batch(op, outer, x, dims, params)
    return outer.bind


def _abstract(op: KernelOp, avals: Sequence[Any], params: dict[str, Any]) -> list[ShapedArray]:
    inputs = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in avals]
    results = jax.eval_shape(lambda *x: op.reference(*x, **params), *inputs)
    return [ShapedArray(r.shape, r.dtype) for r in results]


def _lower_cuda(op: KernelOp, ctx: Any, operands: Sequence[Any], params: dict[str, Any]) -> Sequence[Any]:
    plan = op.plan(*ctx.avals_in, **params)
    if plan is not None and triton_bridge.uses_kernels(plan):
        return triton_bridge.lower_plan(ctx, plan, operands)
    return mlir.lower_fun(op.reference, multiple_results=True)(ctx, *operands, **params)


def _batch(
    op: KernelOp, outer: Primitive, operands: Sequence[jax.Array], dims: Sequence[Any], params: dict[str, Any]
) -> tuple[Sequence[jax.Array], Sequence[int]]:
    """Independent rows take another leading dimension; everything else is batched as jnp code."""
    only_first = dims[0] is not None and all(dim is None for dim in dims[1:])
    if op.rows and only_first and operands[0].ndim > 1:
        results = outer.bind(jnp.moveaxis(operands[0], dims[0], 0), *operands[1:], **params)
    else:
        results = jax.vmap(lambda *x: op.reference(*x, **params), in_axes=tuple(dims))(*operands)
    return results, [0] * len(results)


def _partitioned(
    op: KernelOp, inner: Primitive, operands: Sequence[jax.Array], params: dict[str, Any]
) -> Sequence[jax.Array]:
    """Apply the inner primitive to shards: leading dimensions stay sharded, the last one only if `whole`."""

    @custom_partitioning
    def apply(*x: jax.Array) -> tuple[jax.Array, ...]:
        return tuple(inner.bind(*x, **params))

    def spec_of(shapes: Sequence[Any]) -> list[Any]:
        first = shapes[0]
        spec = list(getattr(first.sharding, "spec", ())) + [None] * len(first.shape)
        spec = spec[: len(first.shape)]
        if not (op.rows or op.combine):
            return [None] * len(spec)
        return spec if op.whole or op.combine else [*spec[:-1], None]

    def shardings(mesh: Any, shapes: Sequence[Any], results: Sequence[Any]) -> tuple[Any, Any]:
        spec = spec_of(shapes)
        first = NamedSharding(mesh, PartitionSpec(*spec))
        common = NamedSharding(mesh, PartitionSpec())
        given = (first, *(common for _ in shapes[1:]))
        made = tuple(common if op.combine or len(r.shape) != len(spec) else first for r in results)
        return given, made

    def infer(mesh: Any, shapes: Sequence[Any], results: Sequence[Any]) -> tuple[Any, ...]:
        return shardings(mesh, shapes, results)[1]

    def partition(mesh: Any, shapes: Sequence[Any], results: Sequence[Any]) -> tuple[Any, ...]:
        given, made = shardings(mesh, shapes, results)
        axes = tuple(name for part in given[0].spec if part for name in _names(part))

        def on_shard(*x: jax.Array) -> tuple[jax.Array, ...]:
            local = tuple(inner.bind(*x, **params))
            return tuple(op.combine(r, axes) for r in local) if op.combine and axes else local

        return mesh, on_shard, made, given

    apply.def_partition(partition=partition, infer_sharding_from_operands=infer, **_rule(op, operands, params))
    return apply(*operands)


def _rule(op: KernelOp, operands: Sequence[jax.Array], params: dict[str, Any]) -> dict[str, Any]:
    """Return Shardy's rule: which dimensions of operands and results are one, and which must be replicated."""
    names = [f"i{k}" for k in range(operands[0].ndim)]
    counter = iter(range(1000))

    def fresh(ndim: int) -> list[str]:
        return [f"o{next(counter)}" for _ in range(ndim)]

    inputs = [names, *(fresh(x.ndim) for x in operands[1:])]
    outputs = []
    for result in jax.eval_shape(lambda *x: op.reference(*x, **params), *operands):
        shared = op.rows and len(result.shape) == len(names)
        outputs.append([*names[:-1], names[-1] if op.whole else fresh(1)[0]] if shared else fresh(len(result.shape)))
    if op.rows and not op.whole and len(outputs[0]) == len(names):
        outputs[0][-1] = names[-1]
    text = f"{', '.join(map(' '.join, inputs))} -> {', '.join(map(' '.join, outputs))}"
    kept = [] if op.whole or op.combine else names[-1:] if op.rows else names
    others = [name for dims in (*inputs[1:], *outputs) for name in dims if name not in names]
    return {"sharding_rule": text, "need_replication_factors": tuple(dict.fromkeys([*kept, *others]))}


def _names(part: Any) -> tuple[str, ...]:
    return part if isinstance(part, tuple) else (part,)


def max_over_shards(key: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Combine int32 amax keys of shards."""
    return lax.pmax(key, axes)
