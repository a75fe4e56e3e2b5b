"""JAX functions as subjects of `fp8_common.testing.certify`."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from numpy.typing import NDArray

from fp8_common.testing.certify import GRADIENT, Cast, Subject, Trace

RATE = 2.0**-6
"""Learning rate of the update, exact in all dtypes."""


def descend(variables: Any, gradients: Any) -> Any:
    """Return the variables after one step of gradient descent."""
    return jax.tree.map(
        lambda value, gradient: (value - gradient.dtype.type(RATE) * gradient).astype(value.dtype), variables, gradients
    )


def subject(
    model: tuple[Callable[..., Any], Any],
    inputs: ArrayLike,
    *,
    value_and_grad: Callable[..., Any] = jax.value_and_grad,
    add: Callable[[Any, Any], Any] = lambda first, second: jax.tree.map(jnp.add, first, second),
    update: Callable[[Any, Any], Any] = descend,
    compared: Callable[[Any], Any] = lambda gradients: gradients,
    casts: Mapping[str, Cast] | None = None,
    warmup: int = 0,
) -> Subject:
    """Return a JAX function as a subject for `certify`.

    "mesh-invariant" is not tested.

    Args:
        model: Pair (function, variables). The function of variables and inputs returns its output, or a pair of the
            output and a dictionary of layers' outputs, in order of computation.
        inputs: Array [examples, tokens, ...].
        value_and_grad: Replacement for `jax.value_and_grad`.
        add: Function that combines the gradients of two micro-batches.
        update: Function of variables and gradients that returns the next variables.
        compared: Function that selects the gradients to compare, for example without overwritten variables.
        casts: Casts into FP8 by name.
        warmup: Number of steps before the tests, to fill the histories of delayed scaling.
    """
    function, start = model
    names: list[str] = []

    def loss(variables: Any, x: jax.Array, counted: jax.Array) -> tuple[jax.Array, dict[str, Any]]:
        results = function(variables, x)
        output, layers = results if isinstance(results, tuple) else (results, {})
        names[:] = [*layers, "output"]  # recorded while tracing, because jit sorts results by name
        # The weights are small integers that differ: their sums are exact if the sums of the model are.
        weights = (np.arange(output[0].size).reshape(output.shape[1:]) * 7 % 5 - 2).astype(np.float32)
        mask = counted.reshape(*counted.shape, *(1,) * (output.ndim - 2)).astype(jnp.float32)
        return (output.astype(jnp.float32) * weights * mask).sum(), {**layers, "output": output}

    step = jax.jit(value_and_grad(loss, has_aux=True))

    def advanced(variables: Any, x: NDArray[Any], counted: NDArray[np.bool_], chunks: int) -> tuple[Trace, Any]:
        parts = zip(np.split(x, chunks), np.split(counted, chunks), strict=True)
        results = [step(variables, part, mask) for part, mask in parts]
        gradients = functools.reduce(add, [each for _, each in results])
        layers = [aux for (_, aux), _ in results]
        outputs = {name: np.concatenate([np.asarray(each[name]) for each in layers]) for name in names}
        leaves = reversed(jax.tree_util.tree_leaves_with_path(compared(gradients)))
        named = {jax.tree_util.keystr(path) + GRADIENT: np.asarray(leaf) for path, leaf in leaves}
        return outputs | named, lambda: update(variables, gradients)

    def reload(variables: Any) -> Any:
        # Through bytes, which contain the values only.
        leaves, structure = jax.tree.flatten(jax.tree.map(np.asarray, variables))
        return structure.unflatten([np.frombuffer(x.tobytes(), x.dtype).reshape(x.shape) for x in leaves])

    for _ in range(warmup):
        start = advanced(start, np.asarray(inputs), np.ones(np.shape(inputs)[:2], bool), 1)[1]()
    return Subject(inputs=np.asarray(inputs), start=lambda: start, step=advanced, reload=reload, casts=casts or {})
