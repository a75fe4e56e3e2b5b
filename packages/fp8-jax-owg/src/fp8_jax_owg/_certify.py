"""The rows of `fp8 certify` for JAX: the recipes of this package, bfloat16, and flax's own FP8 operations."""

import functools
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from fp8_common import get_recipe
from fp8_common.jax.certify import RATE, descend, subject
from fp8_common.presets import flax
from fp8_common.recipe import CastRecipe
from fp8_common.testing.certify import Certificate, Property, Subject, ask, cast_of, casts_of, example
from fp8_jax_owg.dots.dot import fp8_dot_general
from fp8_jax_owg.gradients import value_and_grad
from fp8_jax_owg.scaling import as_scaling
from fp8_jax_owg.state.pairs import init_meta
from fp8_jax_owg.step import accumulate, apply_updates

INPUTS, WEIGHTS = example()
OWG = "_overwrite_with_gradient"
RECIPES = ("tensorwise", "tensorwise_delayed", "rowwise")
LAST = (((2,), (0,)), ((), ()))
"""The dimensions that a layer contracts."""


def certificates(properties: Sequence[Property]) -> Iterator[tuple[str, Callable[[], Certificate]]]:
    """Yield each row's name, and what makes its certificate."""
    rows: dict[str, Callable[[], Subject]] = {"bf16": _bf16}
    rows |= {name: functools.partial(_own, name) for name in RECIPES}
    if importlib.util.find_spec("flax"):
        rows["flax's Fp8DotGeneralOp"] = _flax
    for name, make in rows.items():
        yield f"JAX {name}", lambda make=make: ask(make(), properties)


def _parameters(gradients: Any) -> Any:
    return {name: each for name, each in gradients.items() if name != OWG}


def _weights(dtype: Any) -> dict[str, Any]:
    return {name: jnp.asarray(weight.T, dtype) for name, weight in WEIGHTS.items()}


def _bf16() -> Subject:
    def function(weights: Any, x: Any) -> Any:
        up = x @ weights["up"]
        return (jax.nn.relu(up)) @ weights["down"], {"up": up}

    return subject((function, _weights(jnp.bfloat16)), jnp.asarray(INPUTS, jnp.bfloat16))


def _own(name: str) -> Subject:
    scaling = as_scaling(name)
    delayed = name == "tensorwise_delayed"

    def function(variables: Any, x: Any) -> Any:
        meta = variables[OWG] if delayed else dict.fromkeys(WEIGHTS)
        dot = lambda layer, y: fp8_dot_general(y, variables[layer], LAST, meta=meta[layer], scaling=scaling)  # noqa: E731
        up = dot("up", x)
        return dot("down", jax.nn.relu(up)), {"up": up}

    def update(variables: Any, gradients: Any) -> Any:
        parameters = {layer: -RATE * gradients[layer] for layer in WEIGHTS}
        return apply_updates(variables, gradients | parameters)

    variables = _weights(jnp.float32) | ({OWG: {layer: init_meta(scaling) for layer in WEIGHTS}} if delayed else {})
    # with delayed scaling from the third step on, when histories are filled
    return subject(
        (function, variables),
        INPUTS,
        value_and_grad=value_and_grad,
        add=accumulate,
        update=update,
        compared=_parameters,
        casts=casts_of(get_recipe(name)),
        warmup=2 * delayed,
    )


def _flax() -> Subject:
    from flax import linen as nn

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            layer = functools.partial(nn.Dense, 16, use_bias=False, dot_general_cls=nn.fp8_ops.Fp8DotGeneralOp)
            up = layer(name="up")(x)
            return layer(name="down")(jax.nn.relu(up)), {"up": up}

    def update(variables: Any, gradients: Any) -> Any:
        return {"params": descend(variables["params"], gradients["params"]), OWG: gradients[OWG]}

    variables = Model().init(jax.random.key(0), INPUTS)
    parameters = {name: {"kernel": weight} for name, weight in _weights(jnp.float32).items()}
    cast = cast_of(CastRecipe(policy=flax(history=0)))
    model = (Model().apply, dict(variables) | {"params": parameters})
    return subject(
        model, INPUTS, update=update, compared=_parameters, casts=dict.fromkeys(("input", "kernel"), cast), warmup=2
    )
