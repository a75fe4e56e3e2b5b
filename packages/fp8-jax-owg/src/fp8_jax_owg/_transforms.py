"""`value_and_grad` and `grad`: ordinary gradients for parameters, next values for overwritten leaves.

Leaves are shared at the top of the loss, once. So a layer that is called several times, under whatever transform,
combines what it observes by MAX. What was not observed keeps its value, element by element.
"""

import functools
import itertools
import logging
import typing
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp

from fp8_common import Fp8Error
from fp8_jax_owg import _compat as compat
from fp8_jax_owg import _cotangent_encoding as cotangents
from fp8_jax_owg._dtype import is_shared
from fp8_jax_owg._marker import map_leaves, owg_flags
from fp8_jax_owg._mode import get_mode, use_mode
from fp8_jax_owg._moves import CannotCombineError, combining, plain
from fp8_jax_owg._reads import watch_reads
from fp8_jax_owg._sharing import adopt_mapping, check_float32, share
from fp8_jax_owg._uses import check_single_reads, check_single_uses
from fp8_jax_owg.observation import resolve

_log = logging.getLogger(__name__)

Unobserved = Literal["old", "-inf"]
UNOBSERVED: tuple[Unobserved, ...] = typing.get_args(Unobserved)


def value_and_grad(
    fun: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    *,
    unobserved: Unobserved = "old",
) -> Callable[..., tuple[Any, Any]]:
    """Return a function that computes `fun` and its gradient, which holds next values where leaves are overwritten.

    Args:
        fun: The loss, as for `jax.value_and_grad`. In mode "fan_out" it is traced once more, to see that no leaf is
            used twice outside of `fp8_jax_owg.scan` and pipelines; pass such a leaf through `fp8_jax_owg.share`. In
            mode "extended" a loss that JAX cannot differentiate because of how it slices, gathers or repeats shared
            leaves is traced and run equation by equation (`fp8_jax_owg._moves`), which combines its uses as well;
            where such a leaf enters a `while_loop`, uses are counted as in mode "fan_out".
        argnums: Which arguments to differentiate.
        has_aux: Whether `fun` returns (loss, anything).
        unobserved: What the gradient holds where nothing was observed: the old value ("old"), which any optimizer
            state may take over, or "-inf", which `accumulate`, `pmean` and `apply_updates` understand. Take the
            latter if gradients of several micro-batches or devices are combined, and layers may be skipped.

    Raises:
        Fp8Error: `unobserved` is unknown, an overwritten leaf is not float32, the loss computes with one, or in mode
            "fan_out" one is used twice.
    """
    if unobserved not in UNOBSERVED:
        raise Fp8Error(f"unobserved must be one of {', '.join(UNOBSERVED)}, got {unobserved!r}.")
    asked = (argnums,) if isinstance(argnums, int) else tuple(argnums)

    @functools.wraps(fun)
    def shared_fun(*args: Any, **kwargs: Any) -> Any:
        converted = list(args)
        for number in asked:
            converted[number] = enter(args[number])
        out = fun(*converted, **kwargs)
        return (out[0], leave(out[1])) if has_aux else out

    differentiate = jax.value_and_grad(shared_fun, argnums, has_aux)

    def state_flags(args: tuple[Any, ...]) -> list[bool]:
        numbers = _counted_from_front(asked, len(args))
        flags = [owg_flags(arg) if n in numbers else [False] * _leaves(arg) for n, arg in enumerate(args)]
        return list(itertools.chain.from_iterable(flags))

    combined = combining(fun, state_flags)
    differentiate_combined = jax.value_and_grad(combined, argnums, has_aux)
    finish = resolve if unobserved == "old" else lambda _, gradient: cotangents.decode(gradient)

    @functools.wraps(fun)
    def run(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        if get_mode() == "extended":
            try:
                # Where this fails, `fun` is called a second time below: what it does besides computing, such as
                # printing, happens twice.
                return run_in_mode(*args, **kwargs)
            except Exception as error:
                if isinstance(error, Fp8Error) or not compat.blames_dtype(error):
                    raise
                _log.info("moves of shared state are combined: %s", error)
            try:
                return run_in_mode(*args, moves=True, **kwargs)
            except Exception as error:
                if not isinstance(error, CannotCombineError) and (
                    isinstance(error, Fp8Error) or not compat.blames_dtype(error)
                ):
                    raise
                _log.info("the loss takes mode fan_out: %s", error)
        # Where the loss moves shared values in ways that are not combined, uses can be counted instead.
        with use_mode("fan_out"):
            return run_in_mode(*args, **kwargs)

    def run_in_mode(*args: Any, moves: bool = False, **kwargs: Any) -> tuple[Any, Any]:
        numbers = _counted_from_front(asked, len(args))
        if get_mode() == "fan_out":
            _check(check_single_uses, lambda *args: fun(*args, **kwargs), args, numbers)
        numbered = [_own_state(arg, (args, kwargs)) if number in numbers else arg for number, arg in enumerate(args)]
        with watch_reads() as reads:
            value, gradients = (differentiate_combined if moves else differentiate)(*numbered, **kwargs)
        # After the gradient, because only then it is known whether `read` was called; layers alone need no second
        # trace.
        if (reads or moves) and get_mode() == "extended":
            shared = combined if moves else shared_fun
            _check(check_single_reads, lambda *args: shared(*args, **kwargs), args, numbers)
        trees = [args[number] for number in numbers]
        found = [gradients] if isinstance(argnums, int) else list(gradients)
        finished = [
            map_leaves(lambda _, g: g, finish, tree, gradient) for tree, gradient in zip(trees, found, strict=True)
        ]
        return value, finished[0] if isinstance(argnums, int) else tuple(finished)

    return run


def grad(
    fun: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    *,
    unobserved: Unobserved = "old",
) -> Callable[..., Any]:
    """Return a function that computes the gradient of `fun`; arguments and errors are those of `value_and_grad`.

    With `has_aux` it returns (gradient, aux).
    """
    both = value_and_grad(fun, argnums, has_aux, unobserved=unobserved)

    @functools.wraps(fun)
    def run(*args: Any, **kwargs: Any) -> Any:
        value, gradients = both(*args, **kwargs)
        return (gradients, value[1]) if has_aux else gradients

    return run


def _counted_from_front(argnums: Sequence[int], count: int) -> tuple[int, ...]:
    """Return argument numbers of which negative ones, as JAX has them, count from the last of `count` arguments."""
    # what is out of range stays: JAX says so
    return tuple(number + count if -count <= number < 0 else number for number in argnums)


def _leaves(tree: Any) -> int:
    return len(jax.tree.leaves(tree))


def _own_state(tree: Any, arguments: Any) -> Any:
    """Return an argument whose overwritten leaves are mapped by `vmap` wherever one of all arguments is."""
    return map_leaves(lambda x: x, lambda x: adopt_mapping(x, arguments), tree)


def enter(tree: Any) -> Any:
    """Return the tree with overwritten leaves shared, where the mode allows it; others stay.

    Raises:
        Fp8Error: An overwritten leaf is not float32.
    """
    convert = share if get_mode() == "extended" else check_float32
    return map_leaves(lambda x: x, convert, tree)


def leave(tree: Any) -> Any:
    """Return a tree whose shared leaves are float32, as whoever called `value_and_grad` knows them."""
    leaves, structure = jax.tree.flatten(tree)
    # what holds none is handed on as the same object
    return structure.unflatten(map(plain, leaves)) if any(map(is_shared, leaves)) else tree


def _check(how: Callable[..., None], fun: Callable[..., Any], args: Sequence[Any], numbers: Sequence[int]) -> None:
    """Check `fun` as a function of the overwritten leaves of the differentiated arguments, by their names."""
    trees = {number: jax.tree_util.tree_flatten_with_path(args[number]) for number in numbers}
    marked = {number: owg_flags(args[number]) for number in numbers}
    found = [item for n in numbers for item, flag in zip(trees[n][0], marked[n], strict=True) if flag]

    def loss(leaves: list[Any]) -> Any:
        values, converted = iter(leaves), list(args)
        for number, (items, structure) in trees.items():
            new = [next(values) if flag else leaf for (_, leaf), flag in zip(items, marked[number], strict=True)]
            converted[number] = structure.unflatten(new)
        out = fun(*converted)
        # With has_aux `fun` returns (loss, aux), and aux need not be arrays.
        return out[0] if isinstance(out, tuple) else out

    if found:
        names = [jax.tree_util.keystr(path) or "that is differentiated" for path, _ in found]
        how(loss, [check_float32(leaf) for _, leaf in found], names)


def cast_params(tree: Any, dtype: Any) -> Any:
    """Return the tree with floating-point parameters in `dtype`; overwritten leaves and others stay as they are.

    Args:
        tree: Variables, parameters or gradients.
        dtype: A floating-point dtype, e.g. `jnp.bfloat16`.
    """

    def cast(x: Any) -> Any:
        is_float = jnp.issubdtype(getattr(x, "dtype", type(x)), jnp.floating)
        return jnp.asarray(x, dtype) if is_float else x

    return map_leaves(cast, lambda x: x, tree)
