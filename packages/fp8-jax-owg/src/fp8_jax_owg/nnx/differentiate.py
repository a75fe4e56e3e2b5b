"""`value_and_grad` of NNX models: like `nnx.value_and_grad`, with overwritten leaves."""

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
    """Return a function for a loss and its gradient by models.

    Models are among the loss's arguments.

    State is treated like batch statistics: the models hold its next value afterwards, the gradient has only
    parameters, and the stock `nnx.Optimizer` is right. Gradients of several micro-batches, devices or steps that may
    be thrown away need the state in the gradient: name `OverwriteWithGradient` in `wrt`.

    Args:
        fun: `fun(model, *args)`. Its other changes to arguments are kept: batch statistics of the model, random
            numbers, metrics, caches.
        has_aux: Whether `fun` returns (loss, anything).
        argnums: Which arguments are differentiated, one number or several.
        wrt: Filter of the differentiated variables. With `nnx.Any(nnx.Param, OverwriteWithGradient)` the gradient also
            holds the observations of the state, models keep their state, and `fp8_jax_owg.accumulate`, `pmean`,
            `optax.MultiSteps` and `apply_updates` accept the gradient.

    Returns:
        A function with the arguments of `fun` that returns (value, gradients), gradients as an `nnx.State`, or a tuple
        of them for several `argnums`.
    """
    numbers = (argnums,) if isinstance(argnums, int) else tuple(argnums)
    asked = filterlib.to_predicate(wrt)
    # the state is differentiated in any case, and is separate if the gradient shall not hold it
    differentiates = filterlib.to_predicate(nnx.Any(wrt, is_overwritten))

    @functools.wraps(fun)
    def run(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        # Positions as text and keyword names in one dictionary: no keyword begins with a digit.
        every = {str(place): arg for place, arg in enumerate(args)} | kwargs
        differentiated = [str(number % len(args)) for number in numbers]
        # together, because arguments may share variables
        objects = {name: arg for name, arg in every.items() if name in differentiated or _holds_variables(arg)}

        def trains(path: Any, value: Any) -> bool:
            return path[0] in differentiated and differentiates(path[1:], value)

        graph, trained, rest = nnx.split(objects, trains, ...)

        def pure(trained: nnx.State) -> tuple[Any, Any]:
            # a copy: variables from outside must not be changed while this is traced
            inner = nnx.merge(graph, trained, rest, copy=True)
            given = every | inner
            out = fun(*(given[str(place)] for place in range(len(args))), **{name: given[name] for name in kwargs})
            value, aux = out if has_aux else (out, None)
            # Of the graph, the trained variables, the other variables and the rest, the third: variables that `fun` may
            # have changed.
            return value, (aux, nnx.split(inner, trains, nnx.Variable, ...)[2])

        both = transforms.value_and_grad(pure, has_aux=True)
        (value, (aux, changed)), gradients = both(trained)
        # Outside of the trace, where the values are arrays again.
        gradients, observed = nnx.split_state(gradients, lambda path, value: asked(path[1:], value), ...)
        _, state = nnx.split_state(trained, lambda path, value: asked(path[1:], value), ...)
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
    """Return a function for a loss's gradient; see `value_and_grad`.

    With `has_aux` it returns (gradients, aux).
    """
    return transforms.gradient_of(value_and_grad(fun, has_aux, argnums=argnums, wrt=wrt), has_aux)
