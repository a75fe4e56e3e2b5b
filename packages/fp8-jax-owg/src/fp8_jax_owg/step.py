"""From gradients to next variables: micro-batches, devices, clipping, and updates.

Parameters are added, averaged, scaled; observations of state are combined by MAX and make the next state.
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
    """Return the initial value of `accumulate`.

    Parameters are 0, nothing is observed.

    Args:
        variables: Variables or gradients.
    """
    leaves, structure = jax.tree.flatten(variables)
    zeros = list(map(jnp.zeros_like, leaves))
    for place in find_pairs(variables):
        if leaves[place.history].shape[-1] == 1:  # which has two entries in gradients
            zeros[place.history] = jnp.zeros((*leaves[place.history].shape[:-1], 2), jnp.float32)
    return structure.unflatten(zeros)


def accumulate(accumulator: Any, gradients: Any) -> Any:
    """Return the sum for parameters and the MAX for overwritten leaves.

    Args:
        accumulator: From `init_accumulator` or `accumulate`.
        gradients: From `value_and_grad`, all for the same state; the history then rolls once for all of them.
    """
    return map_leaves(jnp.add, cotangents.combine_max, accumulator, gradients)


def pmean(gradients: Any, axis_name: str | tuple[str, ...]) -> Any:
    """Return means over a mapped axis, MAX for overwritten leaves.

    Args:
        gradients: From `value_and_grad`, inside `shard_map`, `vmap` or `pmap` over `axis_name`.
        axis_name: One axis or several.

    Raises:
        Fp8Error: The gradient of a parameter is equal on all devices already, because JAX has summed it.
    """
    return _reduce(gradients, axis_name, lax.pmean, "pmean")


def psum(gradients: Any, axis_name: str | tuple[str, ...]) -> Any:
    """Return sums over a mapped axis, MAX for overwritten leaves.

    Errors as for `pmean`.
    """
    return _reduce(gradients, axis_name, lax.psum, "psum")


def _reduce(gradients: Any, axis_name: str | tuple[str, ...], collective: Any, name: str) -> Any:
    axes = (axis_name,) if isinstance(axis_name, str) else tuple(axis_name)
    # inside shard_map(check_vma=True) each value knows along which axes it differs; elsewhere none does.
    # `lax.axis_index` differs along its axes by definition, so its type shows whether types carry axes at all.
    tracked = bool(varying_axes(lax.axis_index(axes)))

    def parameter(gradient: jax.Array) -> jax.Array:
        equal = set(axes) - varying_axes(gradient) if tracked else set()
        if equal:
            raise Fp8Error(
                f"{name} over {', '.join(axes)} got a gradient that is equal along {', '.join(sorted(equal))}: under "
                "shard_map with check_vma=True JAX has summed the gradients of replicated parameters already. Divide "
                "the loss by the global number of examples and leave this call out."
            )
        return collective(gradient, axes)

    def overwritten(gradient: jax.Array) -> jax.Array:
        over = tuple(a for a in axes if not tracked or a in varying_axes(gradient))
        if not over:
            return gradient
        keys = lax.pmax(cotangents.to_ordered(cotangents.decode(gradient)), over)
        return cotangents.zero_where_nothing(cotangents.encode(cotangents.from_ordered(keys)))

    return map_leaves(parameter, overwritten, gradients)


def next_state(variables: Any, gradients: Any) -> Any:
    """Return gradients with observations replaced by the next state.

    For code that overwrites state on its own, such as MaxText's training step. Without an observation a value is kept.
    Observations that were combined in another way than by MAX (summed, averaged, scaled, clipped) make the state NaN.

    Args:
        variables: Parameters and state, from the differentiated call.
        gradients: For state, results of `value_and_grad`, or next values from plain `jax.grad`.
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
    """Return next variables: updated parameters, and `next_state` of state.

    Args:
        variables: Parameters and state.
        updates: From an optimizer wrapped in `fp8_jax_owg.optimizers.bypass_owg`, or gradients.
    """
    # parameters follow `optax.apply_updates`: the sum in the wider dtype, kept in the parameter's dtype
    add = lambda parameter, update: (parameter + update).astype(parameter.dtype)  # noqa: E731
    return map_leaves(add, lambda _, state: state, variables, next_state(variables, updates))


def where_step_valid(valid: Any, new: Any, old: Any) -> Any:
    """Return `new` if the step was valid, else `old`.

    Any equal trees: variables, optimizer states.

    Args:
        valid: Boolean scalar, for example "the loss and the gradients are finite".
        new: The tree after the step.
        old: The tree before it.
    """
    # Selected, and not multiplied by 0 or 1: the step that is thrown away may hold NaN.
    return jax.tree.map(lambda a, b: jnp.where(valid, a, b), new, old)


def all_finite(gradients: Any) -> jax.Array:
    """Return bool []: whether all parameter gradients are finite.

    An infinite or NaN element of an input, kernel or output gradient is NaN after the cast to FP8, and so are results
    computed from it, so it shows here. Finite values saturate, and do not. For `apply_gradients(valid=...)` and
    `where_step_valid`.
    """
    leaves = jax.tree.leaves(split(gradients)[0])
    return jnp.all(jnp.stack([jnp.all(jnp.isfinite(leaf)) for leaf in leaves] or [jnp.bool_(True)]))


def clip_by_global_norm(gradients: Any, max_norm: float | jax.Array) -> Any:
    """Clip parameter gradients to norm `max_norm`; overwritten leaves stay.

    Args:
        gradients: From `value_and_grad`.
        max_norm: The limit.
    """
    leaves = jax.tree.leaves(split(gradients)[0])
    # The absolute value first makes complex gradients real; in float32, because squares of float16 overflow from 256
    # on.
    squares = [jnp.sum(jnp.square(jnp.abs(leaf).astype(jnp.float32))) for leaf in leaves]
    norm, limit = jnp.sqrt(sum(squares, start=jnp.float32(0))), jnp.asarray(max_norm, jnp.float32)
    # Exactly 1 where nothing is clipped, so that gradients keep their bits.
    factor = jnp.where(norm <= limit, jnp.float32(1), limit / norm)
    return map_parameters(lambda g: g * factor.astype(g.dtype), gradients)


def map_parameters(fn: Callable[[jax.Array], Any], tree: Any) -> Any:
    """Map `fn` over parameters; overwritten leaves stay.

    For loss scaling and averages.

    Args:
        fn: Called with each leaf that is not overwritten.
        tree: Variables, or gradients from `value_and_grad` or `accumulate`.
    """
    return map_leaves(fn, lambda x: x, tree)


def cast_params(tree: Any, dtype: Any) -> Any:
    """Cast floating-point parameters to `dtype`; overwritten leaves and others stay.

    Args:
        tree: Variables, parameters or gradients.
        dtype: A floating-point dtype, e.g. `jnp.bfloat16`.
    """
    is_float = lambda x: jnp.issubdtype(getattr(x, "dtype", type(x)), jnp.floating)  # noqa: E731
    return map_parameters(lambda x: jnp.asarray(x, dtype) if is_float(x) else x, tree)
