"""`share`, `unshare`, `read`, `gate` and `replicated`: state that is used several times.

Outside of a loss state is float32. `share` makes pairs live and of the dtype `fp8_state`, and other overwritten leaves
of `fp32_max_grad`, so that every combination of cotangents is a MAX; layers read state where they use it.
`fp8_jax_owg.value_and_grad` shares all state of its loss. Functions take trees; leaves must be float32 or shared.
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
    """Return state for several uses, whose cotangents will be combined by MAX.

    Args:
        tree: Leaves float32; shared ones stay.

    Raises:
        Fp8Error: A leaf is not float32.
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
            constants.add(place.history)  # matmuls read live leaves alone
    return structure.unflatten([x if i in constants else share_leaf(x) for i, x in enumerate(leaves)])


def share_state(tree: Any) -> Any:
    """Return variables with shared state, as in a `value_and_grad` loss.

    For a loop under plain `jax.grad`: call it before the loop.

    Args:
        tree: Variables; state float32 or shared already.

    Raises:
        Fp8Error: An overwritten leaf is not float32.
    """
    parameters, state = split(tree)
    return merge(parameters, share(state))


def unshare(tree: Any) -> Any:
    """Return shared state as float32, for a `shard_map` or `pmap`.

    For `shard_map` with `check_vma=False`.

    Call `fp8_jax_owg.state.replicated` on it at the top of the mapped function. Without that call each leaf supports a
    single use. Live leaves get a last dimension of 7 instead of 1; computing with them makes the next state NaN, or has
    no effect.

    Args:
        tree: Leaves shared or float32, which stay.

    Raises:
        Fp8Error: A leaf has another dtype.
    """
    return jax.tree.map(unshare_leaf, tree)


def read(tree: Any) -> Any:
    """Return shared state's values as float32, for logs and user functions.

    Args:
        tree: Leaves shared or float32, which stay.

    Returns:
        For a live leaf [..., 1], the stored scale [...] without a gradient; layers do not accept it. For a shared value
        without a pair the value, whose cotangent is a use's observation.

    Raises:
        Fp8Error: A leaf has another dtype.
    """
    return jax.tree.map(lambda x: stored_scale(x) if is_state(x) else unshare_leaf(x), tree)


def gate(tree: Tree, valid: Any) -> Tree:
    """Return the tree; if not `valid`, its observations are dropped.

    Args:
        tree: Leaves float32 [...] or shared.
        valid: Boolean scalar, traced or not. Under `vmap` it may differ for each example.
    """
    # Under vmap the flag may be mapped while the state is not; `like` then combines in the backward.
    flag = jnp.asarray(valid, jnp.bool_)

    def gated(x: Any) -> Any:
        value = _gate(unshare_leaf(x), flag)
        return share_leaf(value, x.dtype) if is_shared(x) else value

    return jax.tree.map(gated, tree)


def replicated(tree: Any, axes: str | tuple[str, ...], *, sharded: str | tuple[str, ...] = ()) -> Any:
    """Share values inside a `shard_map`: observations along `axes` combine by MAX.

    Call it at the top of the mapped function. With `check_vma=False` and a gradient that is taken outside of the
    `shard_map`, JAX sums the results of devices, and cannot do so for shared values: pass
    `fp8_jax_owg.state.unshare(state)` into the `shard_map`. With `check_vma=True` shared values may enter, and layers
    combine the observations of devices automatically.

    Args:
        tree: Leaves float32 or shared.
        axes: Mesh axes along which the values are the same on all devices.
        sharded: Mesh axes along which they differ; together both must name every axis of the `shard_map`.

    Returns:
        The tree, shared.

    Raises:
        Fp8Error: With `check_vma=False`, an axis of the `shard_map` is named nowhere.
    """
    names = (axes,) if isinstance(axes, str) else tuple(axes)
    sharded_axes = (sharded,) if isinstance(sharded, str) else tuple(sharded)
    values = unshare(tree)
    # `lax.axis_index` differs along its axes by definition: if its type does not show it, check_vma is off.
    if not varying_axes(lax.axis_index(names)):
        # Every axis matters: the transpose of `shard_map` sums the results of devices over all axes that an input does
        # not name.
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
    # the same twice, so that under vmap the result differs for each example if `valid` does
    return jnp.where(valid, x, x)


def _gate_backward(residual: tuple[jax.Array, jax.Array], g: jax.Array) -> tuple[jax.Array, None]:
    x, valid = residual
    return cotangents.encode(like(jnp.where(valid, cotangents.decode(g), cotangents.NOT_OBSERVED), x)), None


_gate.defvjp(lambda x, valid: (_gate(x, valid), (x, valid)), _gate_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _same_on(axes: tuple[str, ...], x: jax.Array) -> jax.Array:
    return x


def _same_on_backward(axes: tuple[str, ...], _: None, g: jax.Array) -> tuple[jax.Array]:
    # As integers: a float `pmax` may lose subnormals. Decoded first, as encoded zeros do not sort as observations.
    greatest = cotangents.from_ordered(lax.pmax(cotangents.to_ordered(cotangents.decode(g)), axes))
    # JAX's sum over the devices then has one term
    return (jnp.where(lax.axis_index(axes) == 0, cotangents.encode(greatest), jnp.zeros_like(greatest)),)


_same_on.defvjp(lambda axes, x: (x, None), _same_on_backward)
