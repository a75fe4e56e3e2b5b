"""`value_and_grad` of NNX models: like `nnx.value_and_grad`, with overwritten variables."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from flax import nnx
from flax.nnx import filterlib

from fp8_jax_owg import differentiate as transforms
from fp8_jax_owg.nnx.operations import is_overwritten
from fp8_jax_owg.step import apply_updates


def value_and_grad(
    fun: Callable[..., Any],
    has_aux: bool = False,
    *,
    argnums: int | Sequence[int] = 0,
    wrt: filterlib.Filter = nnx.Param,
) -> Callable[..., tuple[Any, Any]]:
    """Return a function that computes a loss of models and its gradient.

    State is treated like batch statistics: after the call, the models hold the next state, and the gradient has only
    parameters, so the stock `nnx.Optimizer` works. If you combine gradients of several micro-batches or devices, or may
    discard a step, the gradient must hold the observations of the state: name `OverwriteWithGradient` in `wrt`.

    Args:
        fun: Loss `fun(model, *args)`. Its changes to other variables of its arguments are kept: batch statistics,
            random numbers, metrics, caches.
        has_aux: Whether `fun` returns (loss, anything).
        argnums: Positions of the differentiated arguments, one number or several.
        wrt: Filter of the differentiated variables. With `nnx.Any(nnx.Param, OverwriteWithGradient)` the gradient also
            holds the observations of the state, models keep their state, and `fp8_jax_owg.accumulate`, `pmean`,
            `fp8_jax_owg.optimizers.MultiSteps` and `apply_updates` accept the gradient.

    Returns:
        A function with the arguments of `fun` that returns (value, gradient), or ((value, aux), gradient) with
        `has_aux`. The gradient is an `nnx.State`, or a tuple of them for several `argnums`.

    Raises:
        Fp8Error: As for `fp8_jax_owg.value_and_grad`.
    """
    numbers = (argnums,) if isinstance(argnums, int) else tuple(argnums)
    in_gradient = filterlib.to_predicate(wrt)
    # State is always differentiated. It is split from the gradient below unless `wrt` names it.
    differentiates = filterlib.to_predicate(nnx.Any(wrt, is_overwritten))

    @functools.wraps(fun)
    def run(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        # One dictionary holds positions as text and names of keywords, which never begin with a digit.
        every = {str(place): arg for place, arg in enumerate(args)} | kwargs
        differentiated = [str(number % len(args)) for number in numbers]
        # Arguments are split together, because they may share variables.
        objects = {name: arg for name, arg in every.items() if name in differentiated or _holds_variables(arg)}

        def trains(path: Any, value: Any) -> bool:
            return path[0] in differentiated and differentiates(path[1:], value)

        graph, trained, rest = nnx.split(objects, trains, ...)

        def pure(trained: nnx.State) -> tuple[Any, Any]:
            # A copy, because variables from outside must not be changed while this function is traced.
            inner = nnx.merge(graph, trained, rest, copy=True)
            given = every | inner
            out = fun(*(given[str(place)] for place in range(len(args))), **{name: given[name] for name in kwargs})
            value, aux = out if has_aux else (out, None)
            # `fun` may have changed the variables that are not differentiated, which are the third result of the split.
            return value, (aux, nnx.split(inner, trains, nnx.Variable, ...)[2])

        both = transforms.value_and_grad(pure, has_aux=True)
        (value, (aux, changed)), gradients = both(trained)
        # Here, outside of the trace, the values are arrays again.
        gradients, observed = nnx.split_state(gradients, lambda path, value: in_gradient(path[1:], value), ...)
        _, state = nnx.split_state(trained, lambda path, value: in_gradient(path[1:], value), ...)
        nnx.update(objects, changed, apply_updates(state, observed))
        each = [gradients.get(name, nnx.State({})) for name in differentiated]
        return (value, aux) if has_aux else value, each[0] if isinstance(argnums, int) else tuple(each)

    return run


def _holds_variables(argument: Any) -> bool:
    is_object = lambda node: isinstance(node, nnx.Pytree | nnx.Variable)  # noqa: E731
    return any(map(is_object, jax.tree.leaves(argument, is_leaf=is_object)))


def grad(
    fun: Callable[..., Any],
    has_aux: bool = False,
    *,
    argnums: int | Sequence[int] = 0,
    wrt: filterlib.Filter = nnx.Param,
) -> Callable[..., Any]:
    """Return a function that computes the gradient of a loss of models.

    Arguments, errors and effects are those of `value_and_grad`. With `has_aux` the function returns (gradient, aux).
    """
    return transforms.gradient_of(value_and_grad(fun, has_aux, argnums=argnums, wrt=wrt), has_aux)
