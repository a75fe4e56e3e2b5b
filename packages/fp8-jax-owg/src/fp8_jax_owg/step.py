"""Training steps: accumulate and reduce gradients, clip, and update variables.

Gradients of parameters are added, averaged and scaled. Observations of state are combined by MAX and determine the next
state.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from fp8_common import Fp8Error
from fp8_common.jax.numerics import varying_axes
from fp8_jax_owg.state import cotangents
from fp8_jax_owg.state.in_loss import next_pair
from fp8_jax_owg.state.pairs import find_pairs, map_leaves, owg_flags, split, take


def init_accumulator(variables: Any) -> Any:
    """Return the initial accumulator of `accumulate`.

    All leaves are 0, which for state means that nothing was observed.

    Args:
        variables: Variables or gradients, which give the structure, shapes and dtypes.
    """
    leaves, structure = jax.tree.flatten(variables)
    zeros = list(map(jnp.zeros_like, leaves))
    for place in find_pairs(variables):
        if leaves[place.history].shape[-1] == 1:  # in gradients such a history has two entries
            zeros[place.history] = jnp.zeros((*leaves[place.history].shape[:-1], 2), jnp.float32)
    return structure.unflatten(zeros)


def accumulate(accumulator: Any, gradients: Any) -> Any:
    """Add gradients of parameters, and combine overwritten leaves by MAX.

    Args:
        accumulator: Result of `fp8_jax_owg.tree.init_accumulator` or of the last call.
        gradients: From `value_and_grad`. All accumulated gradients must be for the same state; the histories then roll
            once for all of them.

    Returns:
        The next accumulator, a tree like `gradients`.

    Examples:
        >>> import jax.numpy as jnp
        >>> import fp8_jax_owg as owg
        >>> def loss(variables, x):
        ...     return owg.fp8_einsum("bi,io->bo", x, variables["kernel"], meta=variables["fp8"]).sum()
        >>> variables = {"kernel": jnp.eye(16), "fp8": owg.init_meta()}
        >>> accumulator = owg.tree.init_accumulator(variables)
        >>> for scale in (1, 5):  # two micro-batches
        ...     accumulator = owg.accumulate(accumulator, owg.grad(loss)(variables, jnp.full((4, 16), float(scale))))
        >>> float(accumulator["kernel"][0, 0]), float(accumulator["fp8"]["input_amax_history"][0])
        (24.0, 5.0)
    """
    return map_leaves(jnp.add, cotangents.combine_max, accumulator, gradients)


def pmean(gradients: Any, axis_name: str | tuple[str, ...]) -> Any:
    """Average gradients of parameters over a mapped axis; MAX for overwritten leaves.

    Args:
        gradients: From `value_and_grad`, inside `shard_map`, `vmap` or `pmap` over `axis_name`.
        axis_name: One mapped axis or several.

    Raises:
        Fp8Error: If the gradient of a parameter is equal along an axis already, because JAX has summed it: under
            `shard_map` with `check_vma=True`.

    Examples:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> import fp8_jax_owg as owg
        >>> def loss(variables, x):
        ...     return owg.fp8_einsum("bi,io->bo", x, variables["kernel"], meta=variables["fp8"]).sum()
        >>> variables = {"kernel": jnp.eye(16), "fp8": owg.init_meta()}
        >>> def gradients_of(x):  # one part of the batch
        ...     return owg.pmean(owg.grad(loss)(variables, x), "batch")
        >>> x = jnp.array([1.0, 5.0])[:, None, None] * jnp.ones((2, 4, 16))
        >>> gradients = jax.vmap(gradients_of, axis_name="batch")(x)  # equal for both parts
        >>> gradients["kernel"][:, 0, 0].tolist(), gradients["fp8"]["input_amax_history"][:, 0].tolist()
        ([12.0, 12.0], [5.0, 5.0])
    """
    return _reduce(gradients, axis_name, lax.pmean, "pmean")


def psum(gradients: Any, axis_name: str | tuple[str, ...]) -> Any:
    """Sum gradients of parameters over a mapped axis; MAX for overwritten leaves.

    Args:
        gradients: As in `pmean`.
        axis_name: As in `pmean`.

    Raises:
        Fp8Error: As in `pmean`.

    Examples:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> import fp8_jax_owg as owg
        >>> def loss(variables, x):
        ...     return owg.fp8_einsum("bi,io->bo", x, variables["kernel"], meta=variables["fp8"]).sum()
        >>> variables = {"kernel": jnp.eye(16), "fp8": owg.init_meta()}
        >>> def gradients_of(x):  # one part of the batch
        ...     return owg.psum(owg.grad(loss)(variables, x), "batch")
        >>> x = jnp.array([1.0, 5.0])[:, None, None] * jnp.ones((2, 4, 16))
        >>> gradients = jax.vmap(gradients_of, axis_name="batch")(x)  # equal for both parts
        >>> gradients["kernel"][:, 0, 0].tolist(), gradients["fp8"]["input_amax_history"][:, 0].tolist()
        ([24.0, 24.0], [5.0, 5.0])
    """
    return _reduce(gradients, axis_name, lax.psum, "psum")


def _reduce(gradients: Any, axis_name: str | tuple[str, ...], collective: Any, name: str) -> Any:
    axes = (axis_name,) if isinstance(axis_name, str) else tuple(axis_name)
    # Inside `shard_map(check_vma=True)` the type of each value holds the axes along which it differs; elsewhere no type
    # does. `lax.axis_index` differs along its axes by definition, so its type shows which of both is the case.
    tracked = bool(varying_axes(lax.axis_index(axes)))

    def parameter(gradient: jax.Array) -> jax.Array:
        equal = set(axes) - varying_axes(gradient) if tracked else set()
        if equal:
            raise Fp8Error(
                f"{name} over {', '.join(axes)} got a gradient that is equal along {', '.join(sorted(equal))}: under "
                "shard_map with check_vma=True JAX has summed the gradients of replicated parameters already. Divide "
                "the loss by the global number of examples, and omit this call."
            )
        return collective(gradient, axes)

    def overwritten(gradient: jax.Array) -> jax.Array:
        differing = tuple(axis for axis in axes if not tracked or axis in varying_axes(gradient))
        if not differing:
            return gradient
        keys = lax.pmax(cotangents.to_ordered(cotangents.decode(gradient)), differing)
        return cotangents.zero_where_nothing(cotangents.encode(cotangents.from_ordered(keys)))

    return map_leaves(parameter, overwritten, gradients)


def next_state(variables: Any, gradients: Any) -> Any:
    """Return gradients with observations replaced by the next state.

    For code that replaces state without `apply_updates`, such as MaxText's training step. A leaf without an observation
    keeps its value. Observations that were not combined by MAX (summed, averaged, scaled, clipped) make the state NaN.

    Args:
        variables: Parameters and state that were differentiated.
        gradients: Gradients of parameters; for state, observations from `value_and_grad` or next values from plain
            `jax.grad`.

    Returns:
        A tree like `variables`: `gradients` at parameters, the next state elsewhere.
    """
    leaves, structure = jax.tree.flatten(variables)
    after = structure.flatten_up_to(gradients)
    pairs = find_pairs(variables)
    in_pairs = {place for pair in pairs for place in pair}
    for i, flag in enumerate(owg_flags(variables)):
        if flag and i not in in_pairs:
            observed = cotangents.decode(after[i])
            after[i] = jnp.where(cotangents.is_observed(observed), observed, leaves[i])
    for pair in pairs:
        after[pair.scale], after[pair.history] = next_pair(take(leaves, pair), take(after, pair))
    return structure.unflatten(after)


def apply_updates(variables: Any, updates: Any) -> Any:
    """Add updates to parameters, and replace state by `next_state`.

    Histories roll once in each call, so call it once per step of the optimizer.

    Args:
        variables: Parameters and state.
        updates: From an optimizer that is wrapped in `fp8_jax_owg.optimizers.bypass_owg`: updates of parameters,
            observations of state.

    Returns:
        The next variables, in the dtypes of `variables`.

    Examples:
        >>> import jax.numpy as jnp
        >>> import fp8_jax_owg as owg
        >>> def loss(variables, x):
        ...     return owg.fp8_einsum("bi,io->bo", x, variables["kernel"], meta=variables["fp8"]).sum()
        >>> variables = {"kernel": jnp.eye(16), "fp8": owg.init_meta()}
        >>> gradients = owg.grad(loss)(variables, jnp.full((4, 16), 2.0))
        >>> updates = owg.tree.map_parameters(lambda g: -0.125 * g, gradients)  # plain gradient descent
        >>> variables = owg.apply_updates(variables, updates)
        >>> float(variables["kernel"][0, 0]), float(variables["fp8"]["input_amax_history"][0])
        (0.0, 2.0)
    """
    # As in `optax.apply_updates`, the sum has the promoted dtype and is cast to the dtype of the parameter.
    add = lambda parameter, update: (parameter + update).astype(parameter.dtype)  # noqa: E731
    return map_leaves(add, lambda _, state: state, variables, next_state(variables, updates))


def where_step_valid(valid: Any, new: Any, old: Any) -> Any:
    """Return `new` if the step was valid, else `old`.

    Args:
        valid: Boolean scalar, for example the result of `all_finite(gradients)`.
        new: Tree after the step: variables, the state of an optimizer, or both.
        old: The same tree before the step.
    """
    # Selected, not multiplied by 0 or 1, because the discarded step may hold NaN.
    return jax.tree.map(lambda a, b: jnp.where(valid, a, b), new, old)


def all_finite(gradients: Any) -> jax.Array:
    """Return whether all parameter gradients are finite, as a boolean scalar.

    An infinite or NaN element of an input, kernel or output gradient is NaN after the cast to FP8, and so are results
    that are computed from it, so this function detects it. Finite values saturate instead. Pass the result to
    `apply_gradients(valid=...)` or `where_step_valid`.
    """
    leaves = jax.tree.leaves(split(gradients)[0])
    return jnp.all(jnp.stack([jnp.all(jnp.isfinite(leaf)) for leaf in leaves] or [jnp.bool_(True)]))


def clip_by_global_norm(gradients: Any, max_norm: float | jax.Array) -> Any:
    """Clip parameter gradients to a global norm; overwritten leaves are unchanged.

    Args:
        gradients: From `value_and_grad`.
        max_norm: Largest norm of all parameter gradients together.
    """
    leaves = jax.tree.leaves(split(gradients)[0])
    # The absolute value makes complex gradients real. Squares are computed in float32, because in float16 they overflow
    # from 256 on.
    squares = [jnp.sum(jnp.square(jnp.abs(leaf).astype(jnp.float32))) for leaf in leaves]
    norm, limit = jnp.sqrt(sum(squares, start=jnp.float32(0))), jnp.asarray(max_norm, jnp.float32)
    # The factor is exactly 1 if nothing is clipped, so that gradients keep their bits.
    factor = jnp.where(norm <= limit, jnp.float32(1), limit / norm)
    return map_parameters(lambda g: g * factor.astype(g.dtype), gradients)


def map_parameters(fn: Callable[[jax.Array], Any], tree: Any) -> Any:
    """Map a function over parameters; overwritten leaves are unchanged.

    Use it to unscale a loss or to divide accumulated gradients.

    Args:
        fn: Function of each leaf that is not overwritten.
        tree: Variables, or gradients from `value_and_grad` or `accumulate`.
    """
    return map_leaves(fn, lambda x: x, tree)


def cast_params(tree: Any, dtype: Any) -> Any:
    """Cast floating-point parameters; overwritten and other leaves are unchanged.

    Args:
        tree: Variables, parameters or gradients.
        dtype: Floating-point dtype, for example `jnp.bfloat16`.
    """
    is_float = lambda x: jnp.issubdtype(getattr(x, "dtype", type(x)), jnp.floating)  # noqa: E731
    return map_parameters(lambda x: jnp.asarray(x, dtype) if is_float(x) else x, tree)
