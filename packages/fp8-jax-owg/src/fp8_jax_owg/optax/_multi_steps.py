"""`MultiSteps`: one step of the optimizer for the gradients of several micro-batches.

The history rolls once per step, because the state is overwritten once per step.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fp8_common import Fp8Error
from fp8_jax_owg import _cotangent_encoding as cotangents
from fp8_jax_owg._marker import merge, split


class MultiStepsState(NamedTuple):
    """State of `MultiSteps`.

    Attributes:
        parameters: State of `optax.MultiSteps`.
        overwritten: MAX of what was observed since the last step; None at parameters.
    """

    parameters: optax.MultiStepsState
    overwritten: Any


class MultiSteps:
    """`optax.MultiSteps` for variables with overwritten leaves: parameters average, observations meet by MAX.

    Between two steps of the optimizer, updates of overwritten leaves are -inf, so `fp8_jax_owg.apply_updates` keeps
    them: a history rolls once per step of the optimizer. Gradients should come from
    `value_and_grad(..., unobserved="-inf")` if layers may be skipped.
    """

    def __init__(self, inner: optax.GradientTransformation, every_k_schedule: int | Callable[..., Any]) -> None:
        """Wrap an optimizer.

        Args:
            inner: Any optax optimizer, not wrapped in `bypass_owg`.
            every_k_schedule: Number of micro-batches per step, or a function of the step that returns it.

        Raises:
            Fp8Error: The number is below 1.
        """
        if isinstance(every_k_schedule, int) and every_k_schedule < 1:
            raise Fp8Error(f"every_k_schedule must be at least 1, got {every_k_schedule}.")
        self._parameters = optax.MultiSteps(inner, every_k_schedule)

    def init(self, params: Any) -> MultiStepsState:
        """Return the state for variables."""
        parameters, overwritten = split(params)
        return MultiStepsState(self._parameters.init(parameters), _nothing(overwritten))

    def update(self, updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, MultiStepsState]:
        """Return the updates, zero and -inf unless a step is due, and the next state."""
        parameters, overwritten = split(updates)
        known = None if params is None else split(params)[0]
        # optax divides floats by its integer counter
        with jax.numpy_dtype_promotion("standard"):
            changes, inner = self._parameters.update(parameters, state.parameters, known, **extra)
        seen = jax.tree.map(cotangents.maximum, state.overwritten, overwritten)
        due = self._parameters.has_updated(inner)
        nothing = _nothing(seen)
        # `due` is known only when the program runs: both are computed, and one is selected.
        emitted = jax.tree.map(lambda a, b: jnp.where(due, a, b), seen, nothing)
        kept = jax.tree.map(lambda a, b: jnp.where(due, b, a), seen, nothing)
        return merge(changes, emitted), MultiStepsState(inner, kept)

    def has_updated(self, state: MultiStepsState) -> jax.Array:
        """Whether the last update was a step of the optimizer."""
        return jnp.asarray(self._parameters.has_updated(state.parameters))

    def gradient_transformation(self) -> optax.GradientTransformationExtraArgs:
        """Return init and update as optax's train loops expect them."""
        return optax.GradientTransformationExtraArgs(self.init, self.update)


def _nothing(tree: Any) -> Any:
    return jax.tree.map(lambda x: jnp.full_like(x, cotangents.NOT_OBSERVED), tree)
