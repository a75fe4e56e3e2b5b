"""`combining` interprets a loss that moves state in ways JAX cannot differentiate.

`fp8_jax_owg.value_and_grad` falls back to this module if JAX fails to differentiate a loss. JAX has no gradient for
some operations that move elements of shared state; the gradient of a gather, for example, would add to an array of the
shared dtype. Here the loss is traced and run equation by equation: equations that move elements of shared state get a
gradient rule that combines by MAX, and all others run unchanged.
"""

import functools
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
from fp8_jax_owg.state.cotangents import from_values, is_shared, values_of

MOVES = frozenset({"broadcast_in_dim", "gather", "slice", "tile"})
"""Primitives that move elements of their first operand, and whose transposes in JAX add or pad."""


def combining(fun: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    """Return `fun`, interpreted so that gradients of moved state combine by MAX.

    Args:
        fun: Function of a list of arrays, shared or not. It is traced once in each call.
    """

    def run(tree: list[Any]) -> Any:
        leaves, structure = jax.tree.flatten(tree)
        flat, rebuild = arrays_alone(lambda *arrays: fun(structure.unflatten(arrays)))
        return rebuild(_run(jax.make_jaxpr(flat)(*leaves), leaves))

    return run


def arrays_alone(fun: Callable[..., Any]) -> tuple[Callable[..., list[Any]], Callable[[Iterable[Any]], Any]]:
    """Return `fun` with only its array outputs, and their inverse.

    The first function can be traced even if the result of `fun` holds other objects. The second function returns the
    result of `fun` with other arrays; call it after the first one was traced.
    """
    latest: list[Any] = []

    def is_array(x: Any) -> bool:
        return isinstance(x, jax.Array | np.ndarray)

    def flat(*args: Any) -> list[Any]:
        latest[:] = jax.tree.flatten(fun(*args))
        return [x for x in latest[0] if is_array(x)]

    def rebuild(arrays: Iterable[Any]) -> Any:
        results, (out, structure) = iter(arrays), latest
        return structure.unflatten([next(results) if is_array(x) else x for x in out])

    return flat, rebuild


def _run(program: Any, values: Sequence[Any]) -> list[Any]:
    """Run a traced program on values and return its results."""
    consts, program = getattr(program, "consts", ()), getattr(program, "jaxpr", program)
    environment = dict(zip([*program.constvars, *program.invars], [*consts, *values], strict=True))

    def value(x: Any) -> Any:
        return x.val if isinstance(x, core.Literal) else environment[x]

    for equation in program.eqns:
        results = _run_equation(equation, [value(x) for x in equation.invars])
        environment.update(zip(equation.outvars, results, strict=True))
    return [value(x) for x in program.outvars]


def _run_equation(equation: Any, values: list[Any]) -> list[Any]:
    """Run one equation on values and return its results.

    Raises:
        Fp8Error: If shared state enters a `while` loop or a function with a custom JVP.
    """
    name, params = equation.primitive.name, equation.params
    if not any(map(is_shared, values)) and not any(map(_holds_state, _programs_in(equation))):
        return _bind(equation, values)
    if name in MOVES:
        return _move(equation, values)
    if name == "scan":
        return _run_scan(equation, values)
    if name == "cond":
        return lax.switch(values[0], [functools.partial(_called, branch) for branch in params["branches"]], *values[1:])
    if name in ("jit", "pjit"):
        return _run(params["jaxpr"], values)
    if name in ("checkpoint", "remat2"):
        options = {key: params[key] for key in ("prevent_cse", "policy")}
        return jax.checkpoint(functools.partial(_called, params["jaxpr"]), **options)(*values)
    if name == "shard_map":
        settings = {key: params[key] for key in ("mesh", "in_specs", "out_specs", "check_vma")}
        # The axes along which the body is mapped have different names in older and newer versions of JAX.
        settings["axis_names"] = params.get("newly_manual_axes") or params["manual_axes"]
        with equation.ctx.manager:
            return list(jax.shard_map(lambda *x: tuple(_run(params["jaxpr"], x)), **settings)(*values))
    if name in ("while", "custom_jvp_call"):
        raise Fp8Error(
            f"The loss cannot be differentiated, because shared state enters {name}. Write the loop with lax.scan or "
            "lax.fori_loop, and functions with custom derivatives with jax.custom_vjp."
        )
    return _bind(equation, values)


def _called(program: Any, *values: Any) -> list[Any]:
    return _run(program, values)


def _programs_in(equation: Any) -> Sequence[Any]:
    """Return the programs of a call, a loop or a condition."""
    params = equation.params
    return params.get("branches") or ([params["jaxpr"]] if "jaxpr" in params else [])


def _holds_state(program: Any) -> bool:
    """Return whether any equation of a program returns a shared dtype."""
    equations = getattr(program, "jaxpr", program).eqns
    results = [x.aval for equation in equations for x in equation.outvars]
    inner_programs = [inner for equation in equations for inner in _programs_in(equation)]
    return any(map(is_shared, results)) or any(map(_holds_state, inner_programs))


def _bind(equation: Any, values: list[Any], **changes: Any) -> list[Any]:
    """Run an equation unchanged, except for the parameters in `changes`."""
    # Under the settings with which it was traced, for example the default precision.
    params = equation.primitive.get_bind_params(equation.params)
    params = {key: changes.get(key, value) for key, value in params.items()}
    with equation.ctx.manager:
        results = equation.primitive.bind(*values, **params)
    return list(results) if equation.primitive.multiple_results else [results]


def _run_scan(equation: Any, values: list[Any]) -> list[Any]:
    params, body = equation.params, equation.params["jaxpr"]
    # Recognized by shapes: scanned inputs have one dimension less in the body, and so have stacked outputs.
    scanned = sum(x.aval.ndim != inner.aval.ndim for x, inner in zip(equation.invars, body.jaxpr.invars, strict=True))
    carried = sum(x.aval.ndim == inner.aval.ndim for x, inner in zip(equation.outvars, body.jaxpr.outvars, strict=True))
    consts = len(values) - scanned - carried
    closed, first, xs = values[:consts], values[consts : consts + carried], values[consts + carried :]

    def step(carry: list[Any], x: list[Any]) -> tuple[list[Any], list[Any]]:
        results = _run(body, [*closed, *carry, *x])
        return results[:carried], results[carried:]

    options = {key: params[key] for key in ("length", "reverse", "unroll")}
    last, ys = lax.scan(step, first, xs, **options)
    return [*last, *ys]


def _move(equation: Any, values: list[Any]) -> list[Any]:
    """Run an equation that moves elements of its first value, differentiably."""
    moved, *rest = values

    def apply(x: jax.Array, rest: list[Any]) -> jax.Array:
        # For element numbers (see `_moved_backward`), -1 marks elements from outside of the operand.
        changes = {"fill_value": -1} if x.dtype == jnp.int32 else {}
        return _bind(equation, [x, *rest], **changes)[0]

    return [_moved(apply, moved.shape, moved.dtype, moved, rest)]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _moved(apply: Any, shape: tuple[int, ...], dtype: Any, x: jax.Array, rest: list[Any]) -> jax.Array:
    return apply(x, rest)


def _moved_backward(
    apply: Any, shape: tuple[int, ...], dtype: Any, rest: list[Any], g: jax.Array
) -> tuple[jax.Array, list[None]]:
    # Moving element numbers in the same way gives the number of the element that each result holds.
    size = math.prod(shape)
    places = apply(jnp.arange(size, dtype=jnp.int32).reshape(shape), rest)
    # Results of a gather from outside of its operand have a number that is outside as well.
    inside = (places >= 0) & (places < size)
    keys = cotangents.to_ordered(jnp.full((size, *dtype.element), cotangents.NOT_OBSERVED))
    keys = keys.at[jnp.where(inside, places, size)].max(cotangents.to_ordered(values_of(g)), mode="drop")
    greatest = cotangents.from_ordered(keys).reshape(*shape, *dtype.element)
    return from_values(greatest, dtype), [None] * len(rest)


_moved.defvjp(lambda apply, shape, dtype, x, rest: (_moved(apply, shape, dtype, x, rest), rest), _moved_backward)
