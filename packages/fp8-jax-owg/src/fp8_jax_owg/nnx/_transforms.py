"""`value_and_grad` of an NNX model: like `nnx.value_and_grad`, with overwritten leaves."""

import functools
from collections.abc import Callable
from typing import Any

from flax import nnx
from flax.nnx import filterlib

from fp8_jax_owg import _transforms as transforms
from fp8_jax_owg._transforms import Unobserved
from fp8_jax_owg.nnx._variables import is_overwritten


def value_and_grad(
    fun: Callable[..., Any],
    has_aux: bool = False,
    *,
    wrt: filterlib.Filter = nnx.Param,
    unobserved: Unobserved = "old",
) -> Callable[..., tuple[Any, nnx.State]]:
    """Return a function that computes a loss and its gradient with respect to its first argument, a model.

    Args:
        fun: `fun(model, *args)`. Other variables that it changes, such as batch statistics, are changed in the model.
        has_aux: Whether `fun` returns (loss, anything).
        wrt: Which variables are trained; `OverwriteWithGradient` are always included.
        unobserved: As for `fp8_jax_owg.value_and_grad`.

    Returns:
        A function with the arguments of `fun` that returns (value, gradients), gradients as an `nnx.State`.
    """

    @functools.wraps(fun)
    def run(model: Any, *args: Any, **kwargs: Any) -> tuple[Any, nnx.State]:
        graph, trained, rest = nnx.split(model, nnx.Any(wrt, is_overwritten), ...)

        def pure(trained: nnx.State) -> tuple[Any, Any]:
            # a copy: variables from outside must not be changed while this is traced
            inner = nnx.merge(graph, trained, rest, copy=True)
            out = fun(inner, *args, **kwargs)
            value, aux = out if has_aux else (out, None)
            return value, (aux, nnx.split(inner, nnx.Any(wrt, is_overwritten), ...)[2])

        both = transforms.value_and_grad(pure, has_aux=True, unobserved=unobserved)
        (value, (aux, changed)), gradients = both(trained)
        nnx.update(model, changed)
        return (value, aux) if has_aux else value, gradients

    return run


def grad(
    fun: Callable[..., Any],
    has_aux: bool = False,
    *,
    wrt: filterlib.Filter = nnx.Param,
    unobserved: Unobserved = "old",
) -> Callable[..., Any]:
    """Return a function that computes the gradient of a loss; arguments are those of `value_and_grad`.

    With `has_aux` it returns (gradients, aux).
    """
    both = value_and_grad(fun, has_aux, wrt=wrt, unobserved=unobserved)

    @functools.wraps(fun)
    def run(model: Any, *args: Any, **kwargs: Any) -> Any:
        value, gradients = both(model, *args, **kwargs)
        return (gradients, value[1]) if has_aux else gradients

    return run
