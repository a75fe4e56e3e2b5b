"""`filter_value_and_grad` of Equinox models: floating-point arrays are differentiated, state gets its next value."""

import functools
from collections.abc import Callable
from typing import Any

import equinox as eqx

from fp8_jax_owg import _combine as combine
from fp8_jax_owg import _transforms as transforms
from fp8_jax_owg._transforms import Unobserved


def filter_value_and_grad(
    fun: Callable[..., Any], *, has_aux: bool = False, unobserved: Unobserved = "old"
) -> Callable[..., tuple[Any, Any]]:
    """Return a function that computes a loss and its gradient with respect to its first argument, a model.

    Args:
        fun: `fun(model, *args)`, as for `eqx.filter_value_and_grad`.
        has_aux: Whether `fun` returns (loss, anything).
        unobserved: As for `fp8_jax_owg.value_and_grad`.

    Returns:
        A function with the arguments of `fun` that returns (value, gradients): the model with None where it has no
        floating-point array, with next values in what `fp8_jax_owg.Overwrite` marks.
    """

    @functools.wraps(fun)
    def run(model: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        arrays, rest = eqx.partition(model, eqx.is_inexact_array)

        def loss(arrays: Any) -> Any:
            # What is no floating-point array is closed over: JAX differentiates with respect to nothing else.
            return fun(eqx.combine(arrays, rest), *args, **kwargs)

        return transforms.value_and_grad(loss, has_aux=has_aux, unobserved=unobserved)(arrays)

    return run


def filter_grad(
    fun: Callable[..., Any], *, has_aux: bool = False, unobserved: Unobserved = "old"
) -> Callable[..., Any]:
    """Return a function that computes the gradient; arguments are those of `filter_value_and_grad`.

    With `has_aux` it returns (gradients, aux).
    """
    both = filter_value_and_grad(fun, has_aux=has_aux, unobserved=unobserved)

    @functools.wraps(fun)
    def run(model: Any, *args: Any, **kwargs: Any) -> Any:
        value, gradients = both(model, *args, **kwargs)
        return (gradients, value[1]) if has_aux else gradients

    return run


def apply_updates(model: Any, updates: Any) -> Any:
    """Return the model after a step: parameters plus updates, overwritten leaves replaced.

    Args:
        model: The model.
        updates: From an optimizer wrapped in `fp8_jax_owg.optax.bypass_owg`, for
            `eqx.filter(model, eqx.is_inexact_array)`.
    """
    arrays, rest = eqx.partition(model, eqx.is_inexact_array)
    return eqx.combine(combine.apply_updates(arrays, updates), rest)
