"""`combining`: a loss in which state may be sliced, gathered, repeated and stacked, with cotangents that meet by MAX.

JAX differentiates what happens to shared state, and for some of it has no gradient: for a gather it would add to an
array of the shared dtype. Here the loss is traced with plain float32 state, and run
equation by equation: what moves elements of shared state is given a gradient, and whatever else takes it reads it.
"""

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core

from fp8_common import Fp8Error
from fp8_jax_owg.state import cotangents
from fp8_jax_owg.state.cotangents import fp32_max_grad, is_shared, read, share_leaf

MOVES = frozenset(
    {"broadcast_in_dim", "concatenate", "copy", "dynamic_slice", "dynamic_update_slice", "expand_dims", "gather"}
    | {"reshape", "rev", "select_n", "sharding_constraint", "slice", "split", "squeeze", "stack", "tile", "transpose"}
)
"""What puts elements of its operands in other places, whatever their dtype."""


def combining(fun: Callable[[list[Any]], Any], is_state: list[bool]) -> Callable[[list[Any]], Any]:
    """Return a function like `fun` that combines what all uses of its state observe, wherever the state is moved.

    Args:
        fun: Any function of a tree of arrays; it must not change them.
        is_state: Which leaves of the tree are state; those are float32.
    """

    def run(tree: list[Any]) -> Any:
        leaves, structure = jax.tree.flatten(tree)
        flat, rebuild = arrays_alone(lambda *arrays: fun(structure.unflatten(arrays)))
        program = jax.make_jaxpr(flat)(*leaves)
        return rebuild(map(plain, _run(program, _shared_where(is_state, leaves))))

    return run


def arrays_alone(fun: Callable[..., Any]) -> tuple[Callable[..., list[Any]], Callable[[Iterable[Any]], Any]]:
    """Return a function like `fun` that returns the arrays of its result alone, and one that makes the result of them.

    For tracing a function of a user, whose result may hold anything. The second is for after the first was traced.
    """
    found: list[Any] = []

    def is_array(x: Any) -> bool:
        return isinstance(x, jax.Array | np.ndarray)

    def flat(*args: Any) -> list[Any]:
        found[:] = jax.tree.flatten(fun(*args))
        return [x for x in found[0] if is_array(x)]

    def rebuild(arrays: Iterable[Any]) -> Any:
        results, (out, structure) = iter(arrays), found
        return structure.unflatten([next(results) if is_array(x) else x for x in out])

    return flat, rebuild


def plain(x: Any) -> Any:
    """Return `x`, as float32 if it is shared."""
    return read(x) if is_shared(x) else x


def _shared_where(flags: Sequence[bool], values: Sequence[Any]) -> list[Any]:
    return [share_leaf(x) if flag else x for flag, x in zip(flags, values, strict=True)]


def _run(program: Any, values: Sequence[Any]) -> list[Any]:
    """Return the results of a traced program; those that are moved shared values are shared."""
    consts, program = getattr(program, "consts", ()), getattr(program, "jaxpr", program)
    known = dict(zip([*program.constvars, *program.invars], [*consts, *values], strict=True))

    def value(x: Any) -> Any:
        return x.val if isinstance(x, core.Literal) else known[x]

    for equation in program.eqns:
        results = _run_equation(equation, [value(x) for x in equation.invars])
        known.update(zip(equation.outvars, results, strict=True))
    return [value(x) for x in program.outvars]


def _run_equation(equation: Any, values: list[Any]) -> list[Any]:
    """Return the results of one equation.

    Raises:
        Fp8Error: Shared state enters a function that is run otherwise than once, and no loop or branch.
    """
    name, params = equation.primitive.name, equation.params
    if not any(map(is_shared, values)):
        return _bind(equation, values)
    if name in MOVES:
        return _move(equation, values)
    if name == "scan":
        return _run_scan(equation, values)
    if name == "cond":
        return _run_branches(equation, values)
    if name in ("jit", "pjit"):
        return _run(params["jaxpr"], values)
    if name in ("checkpoint", "remat2"):
        options = {key: params[key] for key in ("prevent_cse", "policy")}
        return jax.checkpoint(lambda *values: _run(params["jaxpr"], values), **options)(*values)
    if name == "shard_map":
        return _run_shard_map(equation, values)
    if name in ("while", "custom_vmap_call", "custom_jvp_call"):
        raise Fp8Error(
            f"The loss cannot be differentiated, because shared state enters {name}. Take the state out before it with "
            "fp8_jax_owg.read, for a single use, or write the loop with lax.scan or lax.fori_loop."
        )
    # Each reads for itself, so that the cotangents of several meet by MAX; what was traced with shared values, a `read`
    # in a loop of this package, gets them.
    takes = [x.aval.dtype == fp32_max_grad for x in equation.invars]
    return _bind(equation, [x if shared else plain(x) for x, shared in zip(values, takes, strict=True)])


def _bind(equation: Any, values: list[Any], **changes: Any) -> list[Any]:
    # with the settings, of default precision for example, that it was traced with
    params = equation.primitive.get_bind_params(equation.params)
    params = {key: changes.get(key, value) for key, value in params.items()}
    with equation.ctx.manager:
        results = equation.primitive.bind(*values, **params)
    return list(results) if equation.primitive.multiple_results else [results]


def _run_scan(equation: Any, values: list[Any]) -> list[Any]:
    params, body = equation.params, equation.params["jaxpr"]
    # told by shapes: what is scanned over has one dimension less in the body, and what is stacked one more outside
    scanned = sum(x.aval.ndim != own.aval.ndim for x, own in zip(equation.invars, body.jaxpr.invars, strict=True))
    carried = sum(x.aval.ndim == own.aval.ndim for x, own in zip(equation.outvars, body.jaxpr.outvars, strict=True))
    consts = len(values) - scanned - carried
    closed, first, xs = values[:consts], values[consts : consts + carried], values[consts + carried :]
    flags, seen = [is_shared(x) for x in first], [False] * carried

    def step(carry: list[Any], x: list[Any]) -> tuple[list[Any], list[Any]]:
        results = _run(body, [*closed, *carry, *x])
        seen[:] = [flag or is_shared(x) for flag, x in zip(flags, results[:carried], strict=True)]
        return _shared_where(flags, results[:carried]), results[carried:]

    rows = [jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for x in xs]
    jax.eval_shape(step, _shared_where(flags, first), rows)
    while seen != flags:
        # what the body shares in its carry is shared from the first iteration on
        flags = list(seen)
        jax.eval_shape(step, _shared_where(flags, first), rows)
    options = {key: params[key] for key in ("length", "reverse", "unroll")}
    last, ys = lax.scan(step, _shared_where(flags, first), xs, **options)
    return [*last, *ys]


def _run_branches(equation: Any, values: list[Any]) -> list[Any]:
    index, *operands = values
    branches = [functools.partial(_run, branch) for branch in equation.params["branches"]]
    each = [jax.eval_shape(lambda *x, run=run: run(x), *operands) for run in branches]
    flags = [any(map(is_shared, results)) for results in zip(*each, strict=True)]
    return lax.switch(index, [lambda *x, run=run: _shared_where(flags, run(x)) for run in branches], *operands)


def _run_shard_map(equation: Any, values: list[Any]) -> list[Any]:
    # It takes no shared values and returns none: each is read before, and shared again by what the body calls.
    params = equation.params
    settings = {key: params[key] for key in ("mesh", "in_specs", "out_specs", "check_vma")}
    # the axes that the body is mapped along, under the name of older versions of JAX or of newer ones
    axes = params["newly_manual_axes"] if "newly_manual_axes" in params else params["manual_axes"]

    def body(*values: Any) -> tuple[Any, ...]:
        return tuple(map(plain, _run(params["jaxpr"], values)))

    with equation.ctx.manager:
        inside = jax.shard_map(body, axis_names=axes, **settings)
        return list(inside(*map(plain, values)))


def _move(equation: Any, values: list[Any]) -> list[Any]:
    """Return the results of a move, shared; operands that were not shared are, if they are moved as well."""
    # what is moved has the dtype of the result; the rest says where to
    moved = [x.aval.dtype == equation.outvars[0].aval.dtype for x in equation.invars]
    data = [share_leaf(jnp.asarray(x)) for x, flag in zip(values, moved, strict=True) if flag]
    rest = [x for x, flag in zip(values, moved, strict=True) if not flag]

    def apply(data: Sequence[Any], rest: Sequence[Any]) -> list[Any]:
        ours, others = iter(data), iter(rest)
        # of numbers of elements, see `_moved_backward`, -1 is that of what was found outside
        changes = {"fill_value": -1} if data[0].dtype == jnp.int32 else {}
        return _bind(equation, [next(ours) if flag else next(others) for flag in moved], **changes)

    return _moved(apply, tuple(x.shape for x in data), data, rest)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _moved(
    apply: Callable[..., list[Any]], shapes: tuple[tuple[int, ...], ...], data: list[jax.Array], rest: list[Any]
) -> list[jax.Array]:
    plain = [lax.convert_element_type(x, jnp.float32) for x in data]
    return [lax.convert_element_type(x, fp32_max_grad) for x in apply(plain, rest)]


def _moved_backward(
    apply: Callable[..., list[Any]], shapes: tuple[tuple[int, ...], ...], rest: list[Any], gs: list[jax.Array]
) -> tuple[list[jax.Array], list[None]]:
    # The same move of the numbers of elements says which element each result is.
    ends = [0, *itertools.accumulate(map(math.prod, shapes))]
    spans = list(zip(ends, ends[1:], shapes, strict=False))
    numbers = [jnp.arange(first, last, dtype=jnp.int32).reshape(shape) for first, last, shape in spans]
    keys = cotangents.to_ordered(jnp.full(ends[-1], cotangents.NOT_OBSERVED))
    for g, places in zip(gs, apply(numbers, rest), strict=True):
        # what a gather found outside of its operand has a number outside, too
        inside = (places >= 0) & (places < ends[-1])
        seen = cotangents.to_ordered(lax.convert_element_type(g, jnp.float32))
        keys = keys.at[jnp.where(inside, places, ends[-1])].max(seen, mode="drop")
    greatest = cotangents.from_ordered(keys)
    parts = [greatest[first:last].reshape(shape) for first, last, shape in spans]
    return [lax.convert_element_type(part, fp32_max_grad) for part in parts], [None] * len(rest)


_moved.defvjp(lambda apply, shapes, data, rest: (_moved(apply, shapes, data, rest), rest), _moved_backward)
