"""Rows of `fp8 certify` for JAX: bfloat16, recipes, and flax's operations."""

import functools
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from operator import itemgetter
from typing import Any

import jax
import jax.numpy as jnp

from fp8_common.jax.certify import descend, subject
from fp8_common.recipe import CastRecipe, get_recipe
from fp8_common.testing.certify import Certificate, Property, Subject, ask, cast_of, casts_of, example
from fp8_jax_owg.differentiate import value_and_grad
from fp8_jax_owg.dots.dot import fp8_dot_general
from fp8_jax_owg.scaling import as_scaling
from fp8_jax_owg.state.pairs import COLLECTION, init_meta
from fp8_jax_owg.step import accumulate, next_state

INPUTS, WEIGHTS = example()
RECIPES = ("tensorwise", "tensorwise_delayed", "rowwise")
LAST = (((2,), (0,)), ((), ()))
"""Dimension numbers of a layer's matmul."""


def certificates(properties: Sequence[Property]) -> Iterator[tuple[str, Callable[[], Certificate]]]:
    """Yield each row's name with a function for its certificate."""
    rows: dict[str, Callable[[], Subject]] = {"bf16": _bf16}
    rows |= {name: functools.partial(_recipe, name) for name in RECIPES}
    if importlib.util.find_spec("flax"):
        rows["flax's Fp8DotGeneralOp"] = _flax
    for name, make in rows.items():
        yield f"JAX {name}", lambda make=make: ask(make(), properties)


def _weights(dtype: Any) -> dict[str, Any]:
    return {name: jnp.asarray(weight.T, dtype) for name, weight in WEIGHTS.items()}


def _layers(dot: Callable[[str, Any], Any], x: Any) -> Any:
    """Return the output of two layers, and the output of the first."""
    up = dot("up", x)
    return dot("down", jax.nn.relu(up)), {"up": up}


def _updated(variables: Any, after: Any) -> Any:
    """Return next variables from parameter gradients and next state in `after`."""
    return after | {"params": descend(variables["params"], after["params"])}


def _bf16() -> Subject:
    function = lambda weights, x: _layers(lambda name, y: y @ weights[name], x)  # noqa: E731
    return subject((function, _weights(jnp.bfloat16)), jnp.asarray(INPUTS, jnp.bfloat16))


def _recipe(name: str) -> Subject:
    scaling, delayed = as_scaling(name), name == "tensorwise_delayed"
    state = {COLLECTION: {layer: init_meta(scaling) for layer in WEIGHTS}} if delayed else {}

    def function(variables: Any, x: Any) -> Any:
        meta = variables.get(COLLECTION, {})
        dot = lambda layer, y: fp8_dot_general(  # noqa: E731
            y, variables["params"][layer], LAST, meta=meta.get(layer), scaling=scaling
        )
        return _layers(dot, x)

    # Delayed scaling is certified from the third step on, when histories hold observations.
    return subject(
        (function, {"params": _weights(jnp.float32)} | state),
        INPUTS,
        value_and_grad=value_and_grad,
        add=accumulate,
        update=lambda variables, gradients: _updated(variables, next_state(variables, gradients)),
        compared=itemgetter("params"),
        casts=casts_of(get_recipe(name)),
        warmup=2 * delayed,
    )


def _flax() -> Subject:
    from flax import linen as nn

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            layer = functools.partial(nn.Dense, 16, use_bias=False, dot_general_cls=nn.fp8_ops.Fp8DotGeneralOp)
            return _layers(lambda name, y: layer(name=name)(y), x)

    variables = dict(Model().init(jax.random.key(0), INPUTS))
    variables["params"] = {name: {"kernel": weight} for name, weight in _weights(jnp.float32).items()}
    casts = dict.fromkeys(("input", "kernel"), cast_of(CastRecipe()))
    model = (Model().apply, variables)
    return subject(model, INPUTS, update=_updated, compared=itemgetter("params"), casts=casts, warmup=2)
