"""Wrappers of optax that bypass overwritten leaves: `bypass_owg` and `MultiSteps`.

Weight decay, moments, norms and factored statistics would all be wrong for a value that is replaced, and their state
would waste memory. So the wrapped optimizer sees parameters alone. The updates of a wrapper hold the observations of
state: pass them to `fp8_jax_owg.apply_updates`, not to `optax.apply_updates`, which adds.
"""

from collections.abc import Callable, Sequence
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


def bypass_owg(
    inner: optax.GradientTransformation, trained: Sequence[str] | None = None
) -> optax.GradientTransformationExtraArgs:
    """Return an optimizer of parameters that passes overwritten leaves unchanged.

    Apply it outermost: around chains with clipping, weight decay, masks and partitions. `inner` sees None instead of
    overwritten leaves and of collections that are not trained.

    Args:
        inner: Any optax optimizer except `optax.MultiSteps`.
        trained: Names of the collections of Linen variables that are trained, such as `("params",)`. Updates of other
            collections are zero. None trains everything that is not overwritten.

    Raises:
        Fp8Error: If `inner` is an `optax.MultiSteps`, which would roll histories at every micro-batch. Initialization
            raises if the variables hold other collections than `params`, such as batch statistics, and `trained` is
            None.
    """
    if isinstance(inner, optax.MultiSteps):
        raise Fp8Error(
            "bypass_owg of optax.MultiSteps would roll amax histories at every micro-batch. Use "
            "fp8_jax_owg.optimizers.MultiSteps, without bypass_owg."
        )
    optimizer = optax.with_extra_args_support(inner)

    def init(params: Any) -> Any:
        return optimizer.init(_parts(params, trained)[0])

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        parameters, overwritten, rest = _parts(updates, trained)
        # optax permits None instead of params for optimizers that do not read them. The parts of None are None.
        changes, state = optimizer.update(parameters, state, _parts(params, trained)[0], **extra)
        return merge(merge(changes, overwritten), jax.tree.map(jnp.zeros_like, rest)), state

    return optax.GradientTransformationExtraArgs(init, update)


def _parts(tree: Any, trained: Sequence[str] | None) -> tuple[Any, Any, Any]:
    """Return trained, overwritten and other leaves as three trees.

    Each tree has None at the leaves of the others.
    """
    parameters, overwritten = split(tree)
    if not is_variables(tree):
        return parameters, overwritten, jax.tree.map(lambda _: None, parameters)
    names = [name for name in tree if jax.tree.leaves(parameters[name])] if trained is None else trained
    if trained is None and (others := [name for name in names if name != "params"]):
        raise Fp8Error(
            f"The optimizer got {', '.join(map(repr, others))} in addition to 'params'. Moments and weight decay are "
            "wrong for batch statistics and caches: pass trained=('params',) to keep the values of other collections, "
            "or name all trained collections in trained."
        )
    is_trained = jax.tree_util.tree_map_with_path(lambda path, _: path[0].key in names, parameters)
    part = lambda wanted: jax.tree.map(lambda flag, x: x if flag is wanted else None, is_trained, parameters)  # noqa: E731
    return part(True), overwritten, part(False)


def is_variables(tree: Any) -> bool:
    """Return whether a tree is a dictionary of collections with `params`."""
    return (isinstance(tree, dict) or hasattr(tree, "unfreeze")) and "params" in tree


class MultiStepsState(NamedTuple):
    """State of `MultiSteps`.

    Attributes:
        parameters: State of `optax.MultiSteps`.
        overwritten: MAX of the observations since the last step of the optimizer; None at parameters.
    """

    parameters: optax.MultiStepsState
    overwritten: Any


class MultiSteps:
    """`optax.MultiSteps` for variables with overwritten leaves.

    It averages the gradients of parameters, and combines observations by MAX. Between two steps of the optimizer its
    updates hold no observations, so that `fp8_jax_owg.apply_updates` keeps the state: a history rolls once per step of
    the optimizer.
    """

    def __init__(
        self,
        inner: optax.GradientTransformation,
        every_k_schedule: int | Callable[..., Any],
        trained: Sequence[str] | None = None,
    ) -> None:
        """Wrap an optimizer.

        Args:
            inner: Any optax optimizer, not wrapped in `bypass_owg`.
            every_k_schedule: Number of micro-batches per step, or a function of the step that returns this number.
            trained: As for `bypass_owg`.

        Raises:
            Fp8Error: If the number is below 1.
        """
        if isinstance(every_k_schedule, int) and every_k_schedule < 1:
            raise Fp8Error(f"every_k_schedule must be at least 1, got {every_k_schedule}.")
        self._parameters = optax.MultiSteps(inner, every_k_schedule)
        self.trained = trained

    def init(self, params: Any) -> MultiStepsState:
        """Return the initial state for variables."""
        parameters = _parts(params, self.trained)[0]
        return MultiStepsState(self._parameters.init(parameters), split(init_accumulator(params))[1])

    def update(self, updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, MultiStepsState]:
        """Return the updates, zero unless a step is due, and the state."""
        parameters, overwritten, rest = _parts(updates, self.trained)
        # Standard promotion, because optax divides floats by its integer counter.
        with jax.numpy_dtype_promotion("standard"):
            trained = _parts(params, self.trained)[0]
            changes, inner = self._parameters.update(parameters, state.parameters, trained, **extra)
        seen = jax.tree.map(cotangents.combine_max, state.overwritten, overwritten)
        due = self._parameters.has_updated(inner)
        nothing = jax.tree.map(jnp.zeros_like, seen)
        # `due` is known only when the program runs, so both cases are computed and one is selected.
        emitted, kept = where_step_valid(due, (seen, nothing), (nothing, seen))
        changes = merge(changes, jax.tree.map(jnp.zeros_like, rest))
        return merge(changes, emitted), MultiStepsState(inner, kept)

    def has_updated(self, state: MultiStepsState) -> jax.Array:
        """Return whether the last update was a step of the optimizer."""
        return jnp.asarray(self._parameters.has_updated(state.parameters))

    def gradient_transformation(self) -> optax.GradientTransformationExtraArgs:
        """Return `init` and `update` as an optax transformation."""
        return optax.GradientTransformationExtraArgs(self.init, self.update)
