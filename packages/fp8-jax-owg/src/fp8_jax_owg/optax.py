"""optax for variables with state: optimizers that never see it, and one step for several micro-batches.

Weight decay, moments, norms and factored statistics would all be wrong for a value that is replaced, and their state
would waste memory. The wrappers give state past the optimizer: `updates` holds what was observed and goes to
`fp8_jax_owg.apply_updates`, not to `optax.apply_updates`, which adds.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fp8_common.plugin import extra

with extra("fp8-jax-owg[optax]", __name__):
    import optax

from fp8_common import Fp8Error
from fp8_jax_owg.state import cotangents
from fp8_jax_owg.state.pairs import merge, split
from fp8_jax_owg.step import init_accumulator, where_step_valid

__all__ = ["MultiSteps", "MultiStepsState", "bypass_owg"]


def bypass_owg(inner: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Return an optimizer that trains parameters with `inner` and passes overwritten leaves by, unchanged.

    Put it outermost: around chains with clipping, weight decay, masks and partitions. Where there are overwritten
    leaves, `inner` sees None.

    Args:
        inner: Any optax optimizer.

    Raises:
        Fp8Error: It is an `optax.MultiSteps`, between whose steps histories would roll.
    """
    if isinstance(inner, optax.MultiSteps):
        raise Fp8Error(
            "bypass_owg of optax.MultiSteps would roll amax histories at every micro-batch. Take "
            "fp8_jax_owg.optax.MultiSteps, which is not wrapped in bypass_owg."
        )
    optimizer = optax.with_extra_args_support(inner)

    def init(params: Any) -> Any:
        return optimizer.init(split(params)[0])

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        parameters, overwritten = split(updates)
        # optax lets callers leave params out, for optimizers that do not look at them: of None it is None
        changes, state = optimizer.update(parameters, state, split(params)[0], **extra)
        return merge(changes, overwritten), state

    return optax.GradientTransformationExtraArgs(init, update)


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

    Between two steps of the optimizer nothing counts as observed, so `fp8_jax_owg.apply_updates` keeps the state: a
    history rolls once per step of the optimizer.
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
        return MultiStepsState(self._parameters.init(split(params)[0]), split(init_accumulator(params))[1])

    def update(self, updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, MultiStepsState]:
        """Return the updates, zero unless a step is due, and the next state."""
        parameters, overwritten = split(updates)
        # optax divides floats by its integer counter
        with jax.numpy_dtype_promotion("standard"):
            changes, inner = self._parameters.update(parameters, state.parameters, split(params)[0], **extra)
        seen = jax.tree.map(cotangents.meet, state.overwritten, overwritten)
        due = self._parameters.has_updated(inner)
        nothing = jax.tree.map(jnp.zeros_like, seen)
        # `due` is known only when the program runs: both are computed, and one is selected.
        emitted, kept = where_step_valid(due, (seen, nothing), (nothing, seen))
        return merge(changes, emitted), MultiStepsState(inner, kept)

    def has_updated(self, state: MultiStepsState) -> jax.Array:
        """Whether the last update was a step of the optimizer."""
        return jnp.asarray(self._parameters.has_updated(state.parameters))

    def gradient_transformation(self) -> optax.GradientTransformationExtraArgs:
        """Return init and update as optax's train loops expect them."""
        return optax.GradientTransformationExtraArgs(self.init, self.update)
