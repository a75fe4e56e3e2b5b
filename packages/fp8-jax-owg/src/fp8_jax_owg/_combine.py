"""Gradients of micro-batches and devices combined into one, and the change of a state by them.

Parameters are added or averaged, overwritten leaves are combined by MAX and put in the place of the old ones; -inf
stands for "not observed" and keeps what was there.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from fp8_common import Fp8Error
from fp8_common.jax.compat import varying_axes
from fp8_jax_owg import _cotangent_encoding as cotangents
from fp8_jax_owg._marker import map_leaves


def init_accumulator(variables: Any) -> Any:
    """Return what `accumulate` starts from: zeros for parameters, -inf for overwritten leaves."""
    return map_leaves(jnp.zeros_like, lambda x: jnp.full_like(x, cotangents.NOT_OBSERVED), variables)


def accumulate(accumulator: Any, gradients: Any) -> Any:
    """Return the sum for parameters and the MAX for overwritten leaves.

    Args:
        accumulator: From `init_accumulator` or `accumulate`.
        gradients: From `value_and_grad(..., unobserved="-inf")`, all for the same state; the history then rolls once
            for all of them.
    """
    return map_leaves(jnp.add, cotangents.maximum, accumulator, gradients)


def pmean(gradients: Any, axis_name: str | tuple[str, ...]) -> Any:
    """Return the mean over a mapped axis for parameters, the MAX for overwritten leaves.

    Args:
        gradients: From `value_and_grad`, inside `shard_map`, `vmap` or `pmap` over `axis_name`.
        axis_name: One axis or several.

    Raises:
        Fp8Error: The gradient of a parameter is equal on all devices already, because JAX has summed it.
    """
    return _reduce(gradients, axis_name, lax.pmean, "pmean")


def psum(gradients: Any, axis_name: str | tuple[str, ...]) -> Any:
    """Return the sum over a mapped axis for parameters, the MAX for overwritten leaves; errors as for `pmean`."""
    return _reduce(gradients, axis_name, lax.psum, "psum")


def _reduce(gradients: Any, axis_name: str | tuple[str, ...], collective: Any, name: str) -> Any:
    axes = (axis_name,) if isinstance(axis_name, str) else tuple(axis_name)
    # inside shard_map(check_vma=True) each value knows along which axes it differs; elsewhere none does
    # `lax.axis_index` differs along its axes by definition, so its type says whether types say anything at all.
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
        return cotangents.from_ordered(lax.pmax(cotangents.to_ordered(gradient), over)) if over else gradient

    return map_leaves(parameter, overwritten, gradients)


def apply_updates(variables: Any, updates: Any) -> Any:
    """Return the next variables: parameters plus their updates, overwritten leaves replaced.

    A sum cannot replace: 1 + (1.7e-11 - 1) is 0 in float32. So overwritten leaves are taken as they are; what is
    -inf, NaN or infinite keeps the old value, element by element.

    Args:
        variables: The state.
        updates: From an optimizer wrapped in `fp8_jax_owg.optax.bypass_owg`.
    """
    # The rule of `optax.apply_updates` for parameters: the sum in the wider dtype, kept in that of the parameter.
    return map_leaves(lambda p, u: (p + u).astype(p.dtype), replace, variables, updates)


def replace(old: jax.Array, new: jax.Array) -> jax.Array:
    """Return the next value of one overwritten leaf; float32 of any shape."""
    return jnp.where(jnp.isfinite(new), new, old)


def where_step_valid(valid: Any, new: Any, old: Any) -> Any:
    """Return `new` if the step was valid, else `old`; of variables, optimizer states, or any equal trees.

    Args:
        valid: Boolean scalar, for example "the loss and the gradients are finite".
        new: The tree after the step.
        old: The tree before it.
    """
    # Selected, and not multiplied by 0 or 1: the step that is thrown away may hold NaN.
    return jax.tree.map(lambda a, b: jnp.where(valid, a, b), new, old)
