"""`as_one_equation`: a jitted function that traced programs hold as one equation instead of a program inside.

JAX traces the programs of nested `jit` functions again when it splits a loop or a layer into what is known and what is
not, several times for each call. An equation it takes as it is. It is lowered to a call of the jitted function.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import AxisType

from fp8_common.jax.plugin import dispatch
from fp8_jax_owg import _compat as compat
from fp8_jax_owg._first_order import refuse_second_order

Results = Sequence[jax.Array]
Axes = tuple[int | None, ...]


class _Call(NamedTuple):
    """What is static about an equation.

    Attributes:
        structure: Of the positional arguments.
        params: The keyword arguments.
        maps: The `vmap`s around the function, the innermost first: which axes of arguments and of results they map.
    """

    structure: Any
    params: tuple[tuple[str, Any], ...]
    maps: tuple[tuple[Axes, Axes], ...] = ()


def as_one_equation(name: str, function: Any) -> Callable[..., Any]:
    """Return a function of trees of arrays whose calls are one equation each, where the mesh allows it.

    Args:
        name: What the equation is called.
        function: Made by `jax.jit`, with static keyword arguments; positional ones are trees of arrays.
    """
    primitive = Primitive(name)
    primitive.multiple_results = True

    @partial(jax.jit, static_argnames="call", inline=True)
    def flat(*leaves: jax.Array, call: _Call) -> Results:
        def run(*x: jax.Array) -> Results:
            return jax.tree.leaves(function(*call.structure.unflatten(x), **dict(call.params)))

        for in_axes, out_axes in call.maps:
            run = jax.vmap(run, in_axes=in_axes, out_axes=list(out_axes))
        return run(*leaves)

    def abstract(*avals: Any, call: _Call) -> list[ShapedArray]:
        results = flat.eval_shape(*(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in avals), call=call)
        return [ShapedArray(r.shape, r.dtype) for r in results]

    def batch(leaves: Results, dims: Sequence[int | None], call: _Call) -> tuple[Results, Axes]:
        axes = tuple(_axes_of_results(partial(flat, call=call), leaves, dims))
        return primitive.bind(*leaves, call=call._replace(maps=(*call.maps, (tuple(dims), axes)))), axes

    primitive.def_impl(flat)
    primitive.def_abstract_eval(abstract)
    batching.primitive_batchers[primitive] = batch
    ad.primitive_jvps[primitive] = refuse_second_order
    mlir.register_lowering(primitive, mlir.lower_fun(flat, multiple_results=True))

    def apply(*trees: Any, **params: Any) -> Any:
        # Programs with kernels, and types of arrays that tell more than a shape, need the program itself.
        if dispatch.selects_kernels() or _types_tell_more():
            return function(*trees, **params)
        leaves, structure = jax.tree.flatten(trees)
        results = primitive.bind(*leaves, call=_Call(structure, tuple(params.items())))
        return jax.tree.unflatten(jax.tree.structure(function.eval_shape(*trees, **params)), results)

    return apply


def _axes_of_results(run: Callable[..., Any], leaves: Results, dims: Sequence[int | None]) -> list[int | None]:
    """Return 0 for each result that `vmap` maps, None for the others: a shared state must not seem to differ."""
    axes: list[int | None] = []

    def look(*x: jax.Array) -> Results:
        results = run(*x)
        axes[:] = [0 if compat.is_mapped(result) else None for result in results]
        return results

    jax.eval_shape(jax.vmap(look, in_axes=tuple(dims)), *leaves)
    return axes


def _types_tell_more() -> bool:
    """Whether types of arrays here say how they are sharded, or along which axes they differ."""
    mesh = jax.sharding.get_abstract_mesh()
    return any(kind != AxisType.Auto for kind in mesh.axis_types)
