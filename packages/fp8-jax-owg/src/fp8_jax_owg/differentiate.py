"""`value_and_grad` and `grad`: ordinary gradients for parameters, observations for state.

All pairs of scale and history become live leaves before the loss, and all state is shared once, at its top. So a layer
that is called several times, under any transform, combines its observations by MAX.
"""

import functools
import logging
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap

from fp8_common import Fp8Error
from fp8_jax_owg.state import cotangents
from fp8_jax_owg.state.cotangents import (
    COMPUTES_WITH_STATE,
    first_order_only,
    fp8_state,
    fp32_max_grad,
    is_shared,
    is_state,
    share_leaf,
    unshare_leaf,
)
from fp8_jax_owg.state.in_loss import is_at_rest, make_live, stored_scale, to_gradient
from fp8_jax_owg.state.jaxpr_interpreter import arrays_alone, combining
from fp8_jax_owg.state.pairs import check_float32, find_pairs, owg_flags, take

_log = logging.getLogger(__name__)


def value_and_grad(
    fun: Callable[..., Any], argnums: int | Sequence[int] = 0, has_aux: bool = False
) -> Callable[..., tuple[Any, Any]]:
    """Return a function that computes a loss and its gradient.

    In the gradient, overwritten leaves hold what this call observed. `fp8_jax_owg.apply_updates` computes the next
    state from it; `accumulate`, `pmean` and `psum` combine observations of micro-batches and devices by MAX. Any other
    combination makes the next state NaN.

    Args:
        fun: Loss, as for `jax.value_and_grad`. If JAX cannot differentiate it because it slices, gathers or repeats
            shared leaves, `fun` is called a second time, traced, and run equation by equation, which combines these
            uses by MAX as well.
        argnums: Positions of the arguments to differentiate.
        has_aux: Whether `fun` returns (loss, anything).

    Returns:
        A function with the arguments of `fun` that returns (value, gradient). The gradient has the structure and the
        shapes of the arguments, except that an amax history of length 1 has two entries. Overwritten leaves that were
        not observed are 0.

    Raises:
        Fp8Error: If an overwritten leaf is not float32, the loss computes with state, flax's own FP8 layers read state,
            or shared state enters a `while_loop` or a `custom_jvp` function.

    Examples:
        >>> import jax.numpy as jnp
        >>> import fp8_jax_owg as owg
        >>> def loss(variables, x):  # one layer that is called twice
        ...     layer = lambda x: owg.fp8_einsum("bi,io->bo", x, variables["kernel"], meta=variables["fp8"])
        ...     return layer(layer(x)).sum()
        >>> variables = {"kernel": 2 * jnp.eye(16), "fp8": owg.init_meta()}
        >>> value, gradients = owg.value_and_grad(loss)(variables, jnp.ones((4, 16)))
        >>> float(value), float(gradients["fp8"]["input_amax_history"][0])  # inputs with amax 1 and 2
        (256.0, 2.0)
    """

    @functools.wraps(fun)
    def run(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        attempt = functools.partial(_differentiate, fun, argnums, has_aux, args, kwargs)
        try:
            # If this fails, `fun` is called a second time below: its side effects, such as printing, happen twice.
            return attempt(interpreted=False)
        except Exception as error:
            if isinstance(error, Fp8Error) or not any(owg_flags((args, kwargs))):
                raise
            refuse_layers_of_flax(error)
            _log.info("JAX cannot differentiate the loss, which is now run equation by equation: %s", error)
            first_error = error
        try:
            return attempt(interpreted=True)
        except Fp8Error:
            raise
        except Exception as second_error:
            # Eager arrays of an extended dtype raise "Cannot call abstract method".
            words = repr(fp8_state), "abstract method"
            if any(word in text for text in map(str, (first_error, second_error)) for word in words):
                raise Fp8Error(COMPUTES_WITH_STATE) from first_error
            first_error.add_note(f"If this is about FP8 state: {COMPUTES_WITH_STATE}")
            raise first_error from None

    return run


def grad(fun: Callable[..., Any], argnums: int | Sequence[int] = 0, has_aux: bool = False) -> Callable[..., Any]:
    """Return a function that computes the gradient of a loss.

    Arguments, errors and the gradient are those of `value_and_grad`.

    Args:
        fun: Loss.
        argnums: Positions of the arguments to differentiate.
        has_aux: Whether `fun` returns (loss, anything).

    Returns:
        A function with the arguments of `fun` that returns the gradient, or (gradient, aux) with `has_aux`.

    Examples:
        >>> import jax.numpy as jnp
        >>> import fp8_jax_owg as owg
        >>> def loss(variables, x):
        ...     return owg.fp8_einsum("bi,io->bo", x, variables["kernel"], meta=variables["fp8"]).sum()
        >>> variables = {"kernel": jnp.eye(16), "fp8": owg.init_meta()}
        >>> gradients = owg.grad(loss)(variables, 3 * jnp.ones((4, 16)))
        >>> float(gradients["kernel"][0, 0]), float(gradients["fp8"]["input_amax_history"][0])
        (12.0, 3.0)
    """
    return gradient_of(value_and_grad(fun, argnums, has_aux), has_aux)


def gradient_of(both: Callable[..., tuple[Any, Any]], has_aux: bool) -> Callable[..., Any]:
    """Return `both` without the value: the gradient, or (gradient, aux)."""

    @functools.wraps(both)
    def run(*args: Any, **kwargs: Any) -> Any:
        value, gradients = both(*args, **kwargs)
        return (gradients, value[1]) if has_aux else gradients

    return run


def _differentiate(
    fun: Callable[..., Any],
    argnums: int | Sequence[int],
    has_aux: bool,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    interpreted: bool,
) -> tuple[Any, Any]:
    positions = (argnums,) if isinstance(argnums, int) else argnums
    # Negative numbers count from the last argument. Numbers that are out of range raise IndexError below.
    numbers = [number + len(args) if -len(args) <= number < 0 else number for number in positions]
    differentiated = [args[number] for number in numbers]
    leaves, structure = jax.tree.flatten(differentiated)
    state = [i for i, flag in enumerate(owg_flags(differentiated)) if flag]
    state_leaves = _adopt_mapping([check_float32(leaves[i]) for i in state], (args, kwargs))
    for i, leaf in zip(state, state_leaves, strict=True):
        leaves[i] = leaf
    stored_pairs = [place for place in find_pairs(differentiated) if is_at_rest(take(leaves, place))]
    pairs = [take(leaves, place) for place in stored_pairs]
    # The loss sees histories as constants. The gradient of a pair is the gradient of its live leaf.
    constants = {place.history: leaves[place.history] for place in stored_pairs}
    shared = [i for i in state if i not in constants]
    entered = [None if i in constants else leaf for i, leaf in enumerate(leaves)]
    for place, leaf in zip(stored_pairs, make_live(pairs), strict=True):
        entered[place.scale] = leaf
    live = {place.scale for place in stored_pairs}

    def with_state(values: list[Any]) -> Any:
        whole = [constants.get(i, value) for i, value in enumerate(values)]
        for i in shared:
            whole[i] = share_leaf(whole[i], fp8_state if i in live else fp32_max_grad)
        given = list(args)
        for number, tree in zip(numbers, structure.unflatten(whole), strict=True):
            given[number] = tree
        out = fun(*given, **kwargs)
        return (out[0], _at_rest(out[1])) if has_aux else out

    loss = combining(with_state) if interpreted else with_state

    def both(values: list[Any]) -> tuple[Any, list[Any]]:
        value, gradients = jax.value_and_grad(loss, has_aux=has_aux)(values)
        for i in set(shared) - live:
            gradients[i] = cotangents.zero_where_nothing(gradients[i])
        seen = to_gradient(pairs, [gradients[place.scale] for place in stored_pairs])
        for place, pair in zip(stored_pairs, seen, strict=True):
            gradients[place.scale], gradients[place.history] = pair
        return value, gradients

    if any(getattr(jax.config, flag) for flag in ("jax_debug_nans", "jax_debug_infs")):
        # Both settings read the results of eager operations, which may have an extended dtype.
        flat, rebuild = arrays_alone(both)
        value, gradients = rebuild(jax.jit(flat)(entered))
    else:
        value, gradients = both(entered)
    trees = structure.unflatten(gradients)
    return value, trees[0] if isinstance(argnums, int) else tuple(trees)


def _at_rest(aux: Any) -> Any:
    """Return a loss's auxiliary output with shared leaves as float32.

    A live leaf becomes the stored scale [..., 1] of its pair.
    """
    leaves, structure = jax.tree.flatten(aux)
    if not any(map(is_shared, leaves)):
        return aux  # a tree without shared leaves is returned as the same object
    values = [stored_scale(x)[..., None] if is_state(x) else unshare_leaf(x) if is_shared(x) else x for x in leaves]
    return structure.unflatten(values)


def _adopt_mapping(state: list[Any], others: Any) -> list[Any]:
    """Return state that `vmap` maps whenever it maps another argument.

    `vmap(grad(loss))` over examples that start from the same state needs a next state for each example. Without this
    function the state would not be mapped, and all examples would share one next state, as in `grad` of a `vmap`.
    """
    # Only traced values can be mapped.
    traced = [leaf for leaf in jax.tree.leaves(others) if isinstance(leaf, jax.core.Tracer)]
    # JAX does not differentiate `custom_vmap`, and its error does not mention the gradient: `first_order_only` raises a
    # readable one.
    return _mapped_as(*first_order_only((state, traced))) if traced and state else state


@custom_vmap
def _mapped_as(state: list[Any], others: list[Any]) -> list[Any]:
    return state


@_mapped_as.def_vmap
def _(size: int, batched: Any, state: list[Any], others: list[Any]) -> tuple[list[Any], list[bool]]:
    mapped = any(jax.tree.leaves(batched))
    each = [
        x if is_mapped or not mapped else jnp.broadcast_to(x, (size, *x.shape))
        for x, is_mapped in zip(state, batched[0], strict=True)
    ]
    # One example of each argument is enough for outer levels of vmap, which map the remaining dimensions.
    rest = [jnp.moveaxis(x, 0, -1)[..., 0] if is_mapped else x for x, is_mapped in zip(others, batched[1], strict=True)]
    # Called again for an outer `vmap`, which may map other arguments.
    return _mapped_as(each, rest), [mapped] * len(each)


def refuse_layers_of_flax(error: Exception) -> None:
    """Raise a readable error if flax's FP8 operations read live state.

    praxis calls the operations of flax, too. Any other error is ignored.

    Args:
        error: Exception that the loss raised.

    Raises:
        Fp8Error: If `error` names the dtype of live state and comes from `flax.linen.fp8_ops`.
    """
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    if repr(fp8_state) in str(error) and any(f.f_globals.get("__name__") == "flax.linen.fp8_ops" for f in frames):
        raise Fp8Error(
            "flax's own FP8 operations cannot read state inside of fp8_jax_owg.value_and_grad and of this package's "
            "pipelines. Use the operations of fp8_jax_owg.linen (Fp8DirectDotGeneralOp, Fp8Einsum), with the same "
            "variables under the same names, or fp8_jax_owg.fp8_einsum, in_qdq and out_qdq; or differentiate such a "
            "model with jax.value_and_grad."
        ) from error
