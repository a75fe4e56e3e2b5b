"""Conversion of state into dtypes whose cotangents combine by MAX, and back.

Outside of a loss state is float32. `share` converts pairs to live leaves of the dtype `fp8_state`, and other
overwritten leaves to `fp32_max_grad`, so that autodiff combines all their cotangents by MAX. Layers accept both forms.
`fp8_jax_owg.value_and_grad` shares all state of its loss. The functions here are for other cases: plain `jax.grad`,
`shard_map`, logs, and steps without work. They accept trees, whose leaves must be float32 or shared.
"""

import functools
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from fp8_common import Fp8Error
from fp8_common.jax.numerics import varying_axes
from fp8_jax_owg.state import cotangents
from fp8_jax_owg.state.cotangents import fp8_state, is_shared, is_state, like, share_leaf, unshare_leaf
from fp8_jax_owg.state.in_loss import is_at_rest, is_live, live_at_rest, stored_scale
from fp8_jax_owg.state.pairs import Pair, check_float32, find_pairs, merge, split, take

Tree = TypeVar("Tree")


def share(tree: Any) -> Any:
    """Return state for several uses, whose cotangents are combined by MAX.

    Args:
        tree: State alone, float32; shared leaves are returned unchanged. For a tree with parameters, use `share_state`.

    Raises:
        Fp8Error: If a leaf is not float32.
    """
    leaves, structure = jax.tree.flatten(tree)
    constants = set()
    for place in find_pairs(tree):
        pair = take(leaves, place)
        if is_at_rest(pair) and not any(map(is_shared, pair)):
            live = live_at_rest(True, *map(check_float32, pair))
            pair = Pair(live, lax.stop_gradient(pair.history))
        if is_live(pair):
            leaves[place.scale], leaves[place.history] = share_leaf(pair.scale, fp8_state), pair.history
            constants.add(place.history)  # matmuls read only live leaves
    return structure.unflatten([x if i in constants else share_leaf(x) for i, x in enumerate(leaves)])


def share_state(tree: Any) -> Any:
    """Return variables with shared state, as in the loss of `value_and_grad`.

    Under plain `jax.grad`, call it before a loop that uses the variables.

    Args:
        tree: Variables. Parameters, and state that is shared already, are returned unchanged.

    Raises:
        Fp8Error: If an overwritten leaf is not float32.
    """
    parameters, state = split(tree)
    return merge(parameters, share(state))


def unshare(tree: Any) -> Any:
    """Return shared state as float32, to pass it into `shard_map` or `pmap`.

    It is necessary for `pmap`, and for `shard_map` with `check_vma=False`. Call `fp8_jax_owg.state.replicated` on the
    result at the top of the mapped function; without that call, each leaf supports a single use. The last dimension of
    live leaves is 7 instead of 1. Arithmetic on them makes the next state NaN, or has no effect.

    Args:
        tree: Shared leaves; float32 leaves are returned unchanged.

    Raises:
        Fp8Error: If a leaf has another dtype.
    """
    return jax.tree.map(unshare_leaf, tree)


def read(tree: Any) -> Any:
    """Return values of shared state as float32, for logs and custom operations.

    Args:
        tree: Shared leaves; float32 leaves are returned unchanged.

    Returns:
        For a live leaf [..., 1], the stored scale [...], which has no gradient and which layers do not accept. For a
        shared leaf that is no pair, its value; the cotangent of the value is an observation.

    Raises:
        Fp8Error: If a leaf has another dtype.
    """
    return jax.tree.map(lambda x: stored_scale(x) if is_state(x) else unshare_leaf(x), tree)


def gate(tree: Tree, valid: Any) -> Tree:
    """Return the tree; drop its observations if `valid` is false.

    Args:
        tree: State leaves, float32 or shared.
        valid: Boolean scalar, traced or not. Under `vmap` it may differ for each example.
    """
    # Under vmap the flag may be mapped although the state is not; `like` then combines examples in the backward.
    flag = jnp.asarray(valid, jnp.bool_)

    def gated(x: Any) -> Any:
        value = _gate(unshare_leaf(x), flag)
        return share_leaf(value, x.dtype) if is_shared(x) else value

    return jax.tree.map(gated, tree)


def replicated(tree: Any, axes: str | tuple[str, ...], *, sharded: str | tuple[str, ...] = ()) -> Any:
    """Share state inside a `shard_map`; observations along `axes` combine by MAX.

    Call it at the top of the mapped function. If `check_vma=False` and the gradient is taken outside of the
    `shard_map`, JAX sums the cotangents of devices, which shared values do not support: pass
    `fp8_jax_owg.state.unshare(state)` into the `shard_map`. With `check_vma=True` shared values may enter, and layers
    combine the observations of devices automatically.

    Args:
        tree: State leaves, float32 or shared.
        axes: Mesh axes along which the state is equal on all devices.
        sharded: Mesh axes along which it differs. `axes` and `sharded` together must name each axis of the `shard_map`.

    Returns:
        The tree, shared.

    Raises:
        Fp8Error: If `check_vma=False` and neither argument names an axis of the `shard_map`.
    """
    names = (axes,) if isinstance(axes, str) else tuple(axes)
    sharded_axes = (sharded,) if isinstance(sharded, str) else tuple(sharded)
    values = unshare(tree)
    # `lax.axis_index` differs along its axes by definition. If its type does not show this, check_vma is False.
    if not varying_axes(lax.axis_index(names)):
        # The transpose of `shard_map` sums the cotangents of devices over all axes that the specification of an input
        # does not name, so every axis must be named here.
        if unnamed := sorted(set(jax.sharding.get_abstract_mesh().manual_axes) - {*names, *sharded_axes}):
            raise Fp8Error(
                f"replicated got the axes {', '.join(names)}, and the shard_map has {', '.join(unnamed)} as well: "
                "JAX would sum the observations of devices along it. Name it in axes, or in sharded=... if the values "
                "differ along it."
            )
        values = jax.tree.map(functools.partial(_same_on, names), values)
    return share(values)


@jax.custom_vjp
def _gate(x: jax.Array, valid: jax.Array) -> jax.Array:
    # A selection between equal values, so that under vmap the result is mapped if `valid` is.
    return jnp.where(valid, x, x)


def _gate_backward(residual: tuple[jax.Array, jax.Array], g: jax.Array) -> tuple[jax.Array, None]:
    x, valid = residual
    return cotangents.encode(like(jnp.where(valid, cotangents.decode(g), cotangents.NOT_OBSERVED), x)), None


_gate.defvjp(lambda x, valid: (_gate(x, valid), (x, valid)), _gate_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _same_on(axes: tuple[str, ...], x: jax.Array) -> jax.Array:
    return x


def _same_on_backward(axes: tuple[str, ...], _: None, g: jax.Array) -> tuple[jax.Array]:
    # As integers, because a float `pmax` may lose subnormals. Decoded, because encoded zeros are not in the order of
    # observations.
    greatest = cotangents.from_ordered(lax.pmax(cotangents.to_ordered(cotangents.decode(g)), axes))
    # One device returns the maximum and all others zero, so JAX's sum over devices is the maximum.
    return (jnp.where(lax.axis_index(axes) == 0, cotangents.encode(greatest), jnp.zeros_like(greatest)),)


_same_on.defvjp(lambda axes, x: (x, None), _same_on_backward)
