"""`share`, `read`, `fan_out`, `gate`, `replicated` and `scan`: overwritten values that are used several times.

Outside of loops they are float32. `share` makes them `fp32_max_grad`, so that everything that happens to their
cotangents from there on is a MAX; `read`, at the top of the loop's body, makes them float32 again, so that layers
never see the dtype. `fan_out` is the same in public API: one slot for each iteration, and a maximum over the slots.
`scan` takes whichever works. Functions take trees; leaves must be float32.
"""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_batching import custom_vmap

from fp8_common import Fp8Error
from fp8_common.jax.compat import varying_axes
from fp8_jax_owg import _cotangent_encoding as cotangents
from fp8_jax_owg._dtype import fp32_max_grad, is_shared
from fp8_jax_owg._first_order import refuse_second_order
from fp8_jax_owg._histories import split_histories
from fp8_jax_owg._mode import get_mode
from fp8_jax_owg._reads import note_read

Tree = TypeVar("Tree")


@jax.tree_util.register_pytree_node_class
class Slots:
    """A shared value in mode "fan_out": its slots [uses, ...]; `read` takes one."""

    __slots__ = ("slots",)

    def __init__(self, slots: Any) -> None:
        self.slots = slots

    def tree_flatten(self) -> tuple[tuple[Any], None]:
        """Return the slots as the only child."""
        return (self.slots,), None

    @classmethod
    def tree_unflatten(cls, _: None, children: tuple[Any]) -> "Slots":
        """Rebuild from the child."""
        return cls(*children)


def share(tree: Any, uses: int | None = None) -> Any:
    """Return float32 values for several uses, whose cotangents will be combined by MAX; `read` gives each use its own.

    Args:
        tree: Leaves float32; shared ones stay.
        uses: How many uses there will be; mode "fan_out" needs it, mode "extended" does not look at it.

    Raises:
        Fp8Error: A leaf is not float32, or mode "fan_out" is not told `uses`.
    """
    if get_mode() == "extended":
        return jax.tree.map(lambda x: x if is_shared(x) else _share(check_float32(x)), tree)
    if uses is None:
        raise Fp8Error(
            "share needs uses=... in mode fan_out, which keeps a slot for each use. Or use fp8_jax_owg.scan."
        )
    return jax.tree.map(Slots, fan_out(tree, uses))


def read(tree: Any, use: Any = None) -> Any:
    """Return shared values as float32, as layers take them; call it where they are used. float32 leaves stay.

    What is read is good for one use: `value_and_grad` refuses a loss that uses it several times.

    Args:
        tree: From `share`.
        use: The number of this use, from 0 on, static or traced; each use needs its own. Only mode "fan_out" looks at
            it.

    Raises:
        Fp8Error: A leaf is neither float32 nor shared, or mode "fan_out" is not told `use`.
    """
    note_read()
    return as_float32(tree, use)


def as_float32(tree: Any, use: Any = None) -> Any:
    """Return what `read` returns, for functions of this package that use each value once."""
    # `Slots` is a node of the tree, and read as a whole here.
    return jax.tree.map(lambda x: _read_leaf(x, use), tree, is_leaf=lambda x: isinstance(x, Slots))


def fan_out(tree: Tree, uses: int) -> Tree:
    """Return each leaf as `uses` equal slots along a new first axis; each use must take a slot of its own.

    The cotangent of a leaf is the maximum over its slots.

    Args:
        tree: Leaves float32 [...] or shared.
        uses: Number of slots, static.

    Returns:
        The tree with leaves float32 [uses, ...].

    Raises:
        Fp8Error: A leaf is not float32, or `uses` is below 1.
    """
    if uses < 1:
        raise Fp8Error(f"uses must be at least 1, got {uses!r}.")
    return jax.tree.map(lambda x: _fan_out(x, uses), as_float32(tree))


def gate(tree: Tree, valid: Any) -> Tree:
    """Return the tree unchanged; where `valid` is false, nothing that is observed through it counts.

    Args:
        tree: Leaves float32 [...] or shared.
        valid: Boolean scalar, traced or not. Under `vmap` it may differ for each example.
    """
    # Under vmap the flag may be mapped while the state is not; `like` then combines in the backward.
    flag = jnp.asarray(valid, jnp.bool_)
    return _again_shared(jax.tree.map(lambda x: _gate(x, flag), as_float32(tree)), tree)


def replicated(tree: Any, axes: str | tuple[str, ...], *, sharded: str | tuple[str, ...] = ()) -> Any:
    """Return values that several uses inside a `shard_map` may share; what devices along `axes` observe meets by MAX.

    Shared values cannot enter a `shard_map`; they are read before it, and shared again by this function at the top of
    the mapped one. With `check_vma=False` and a gradient that is taken outside of the `shard_map`, JAX would also add
    up what each device returns; with `check_vma=True` layers combine what the devices see by themselves.

    Args:
        tree: Leaves float32 or shared.
        axes: Mesh axes along which the values are the same on all devices.
        sharded: Mesh axes along which they differ; together both must name every axis of the `shard_map`.

    Returns:
        The tree; in mode "extended" its leaves are shared, in mode "fan_out" float32, for a single use.

    Raises:
        Fp8Error: With `check_vma=False`, an axis of the `shard_map` is named nowhere.
    """
    names = (axes,) if isinstance(axes, str) else tuple(axes)
    own = (sharded,) if isinstance(sharded, str) else tuple(sharded)
    values = as_float32(tree)
    # `lax.axis_index` differs along its axes by definition: where its type does not say so, check_vma is off.
    if not varying_axes(lax.axis_index(names)):
        # Every axis matters: the transpose of `shard_map` sums what the devices return over all axes that an input does
        # not name.
        if unnamed := sorted(set(jax.sharding.get_abstract_mesh().manual_axes) - {*names, *own}):
            raise Fp8Error(
                f"replicated got the axes {', '.join(names)}, and the shard_map has {', '.join(unnamed)} as well: "
                "JAX would add up what devices along it observe. Name it in axes, or in sharded=... if the values "
                "differ along it."
            )
        values = jax.tree.map(_replicated_over(names), values)
    return share(values) if get_mode() == "extended" else values


def _again_shared(values: Tree, before: Any) -> Tree:
    """Return values that were read from shared ones, shared as these were."""
    if get_mode() != "extended":
        return values
    leaves, structure = jax.tree.flatten(values)
    shared = [is_shared(leaf) for leaf in jax.tree.leaves(before)]
    return structure.unflatten([_share(x) if flag else x for x, flag in zip(leaves, shared, strict=True)])


def scan(
    f: Callable[[Any, Any, Any], tuple[Any, Any]],
    init: Any,
    xs: Any = None,
    length: int | None = None,
    *,
    owg: Any,
    reverse: bool = False,
    unroll: int | bool = 1,
) -> tuple[Any, Any]:
    """Run `jax.lax.scan` with overwrite-with-gradient values that every iteration uses.

    Of leaves named `*amax_history` only the newest entry goes through the loop (`fp8_jax_owg._histories`).

    Args:
        f: The body, `f(carry, x, owg) -> (carry, y)`; it sees `owg` shared in mode
            "extended", where layers read it once for each use, and as float32 for a single use in mode "fan_out".
        init: The first carry.
        xs: What is scanned over, or None.
        length: Number of iterations; needed without `xs`.
        owg: Tree of float32 (or shared) values.
        reverse: As for `jax.lax.scan`.
        unroll: As for `jax.lax.scan`.

    Returns:
        The last carry and the stacked ys.

    Raises:
        Fp8Error: A leaf of `owg` is not float32, or the number of iterations is unknown.
    """
    loose, whole = split_histories(as_float32(owg))
    if get_mode() == "extended":
        shared = share(loose)

        def body(c: Any, x: Any) -> Any:
            # shared again: an iteration may use a state more than once
            return f(c, x, share(whole(as_float32(shared))))

        return lax.scan(body, init, xs, length, reverse=reverse, unroll=unroll)
    # Scanned over like `xs`, so that iteration i gets slot i, and its cotangent goes there alone.
    slots = fan_out(loose, _iterations(xs, length))
    return lax.scan(lambda c, x: f(c, x[0], whole(x[1])), init, (xs, slots), length, reverse=reverse, unroll=unroll)


def like(observed: jax.Array, value: jax.Array) -> jax.Array:
    """Reduce what was observed to what the state can hold, by MAX.

    Under `vmap` with a state that is shared by the examples, the maximum over the examples; with
    `shard_map(..., check_vma=True)` and a state that is equal on all devices of an axis, the maximum over them.

    Args:
        observed: float32 [...]: decoded observations.
        value: The state it is for; only how it is mapped matters.
    """
    # First over examples of vmap, which only a batching rule sees, then over devices, whose axes the types tell.
    reduced = _over_examples(observed, value)
    missing = tuple(sorted(varying_axes(reduced) - varying_axes(value)))
    return cotangents.from_ordered(lax.pmax(cotangents.to_ordered(reduced), missing)) if missing else reduced


def check_float32(x: Any) -> Any:
    """Return `x`, which must be float32.

    Raises:
        Fp8Error: It is not, with the reason and the remedy.
    """
    dtype = getattr(x, "dtype", None)
    if dtype != jnp.float32:
        raise Fp8Error(
            f"Overwrite-with-gradient values must be float32, got {dtype or type(x).__name__}. Scales and amax "
            "histories lose their meaning in another dtype: cast parameters with fp8_jax_owg.cast_params, which "
            "leaves them alone, or repair a checkpoint with fp8_jax_owg.checkpoint.upgrade."
        )
    return x


def _read_leaf(x: Any, use: Any) -> jax.Array:
    if not isinstance(x, Slots):
        return _read(x) if is_shared(x) else check_float32(x)
    if use is None:
        raise Fp8Error("read needs use=... in mode fan_out: the number of this use, its own for each.")
    return lax.dynamic_index_in_dim(x.slots, use, 0, keepdims=False)


def _iterations(xs: Any, length: int | None) -> int:
    lengths = {np.shape(leaf)[0] for leaf in jax.tree.leaves(xs)}
    if length is None and len(lengths) != 1:
        raise Fp8Error(f"scan needs xs with one leading length, or length; got lengths {sorted(lengths)}.")
    return lengths.pop() if length is None else length


# A rule of its own, because here cotangents leave the dtype, and JAX adds from there on: encoded, a zero of autodiff
# means "not used", and adding it changes nothing.
@jax.custom_vjp
def _share(x: jax.Array) -> jax.Array:
    return lax.convert_element_type(x, fp32_max_grad)


_share.defvjp(
    lambda x: (_share(x), None),
    lambda _, g: (cotangents.encode(lax.convert_element_type(g, jnp.float32)),),
)


@jax.custom_vjp
def _read(x: jax.Array) -> jax.Array:
    return lax.convert_element_type(x, jnp.float32)


# JAX's own transpose of the conversion would take the encoded cotangent for a value
_read.defvjp(
    lambda x: (_read(x), None),
    lambda _, g: (lax.convert_element_type(cotangents.decode(g), fp32_max_grad),),
)


def adopt_mapping(state: Any, others: Any) -> Any:
    """Return a state that `vmap` maps wherever it maps one of the other arguments.

    `vmap(grad(loss))` of examples that start from one state asks for a next state of each. Without this the state is
    the same for all examples inside, as in `grad` of a `vmap`, where they share their next state.
    """
    # Only traced values can be mapped.
    leaves = [leaf for leaf in jax.tree.leaves(others) if isinstance(leaf, jax.core.Tracer)]
    return jax.tree.map(lambda x: _mapped_like(x, *leaves), state) if leaves else state


@jax.custom_jvp
def _mapped_like(x: jax.Array, *others: jax.Array) -> jax.Array:
    return _mapped_as(x, *others)


# as that of `_over_examples`: a gradient is differentiated here
_mapped_like.defjvp(refuse_second_order)


@custom_vmap
def _mapped_as(x: jax.Array, *others: jax.Array) -> jax.Array:
    return x


@_mapped_as.def_vmap
def _(size: int, batched: list[bool], x: jax.Array, *others: jax.Array) -> tuple[jax.Array, bool]:
    each = x if batched[0] or not any(batched) else jnp.broadcast_to(x, (size, *x.shape))
    # further levels of vmap see what is left of the others: one example of each
    left = [jnp.moveaxis(y, 0, -1)[..., 0] if mapped else y for y, mapped in zip(others, batched[1:], strict=True)]
    # Called again for a `vmap` around this one, which may map what this one does not.
    return _mapped_as(each, *left), batched[0] or any(batched)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _fan_out(x: jax.Array, uses: int) -> jax.Array:
    return jnp.broadcast_to(x[None], (uses, *x.shape))


_fan_out.defvjp(
    lambda x, uses: (_fan_out(x, uses), None),
    lambda uses, _, g: (cotangents.encode(cotangents.maximum_over(cotangents.decode(g), 0)),),
)


@jax.custom_vjp
def _gate(x: jax.Array, valid: jax.Array) -> jax.Array:
    # the same twice, so that under vmap the result differs for each example if `valid` does
    return jnp.where(valid, x, x)


def _gate_backward(residual: tuple[jax.Array, jax.Array], g: jax.Array) -> tuple[jax.Array, None]:
    x, valid = residual
    return cotangents.encode(like(jnp.where(valid, cotangents.decode(g), cotangents.NOT_OBSERVED), x)), None


_gate.defvjp(lambda x, valid: (_gate(x, valid), (x, valid)), _gate_backward)


REPLICATED = "_replicated:"
"""The name of the function that `replicated` calls, before its axes; `_uses` knows both from a traced program."""


@functools.cache
def _replicated_over(axes: tuple[str, ...]) -> Callable[[jax.Array], jax.Array]:
    def same(x: jax.Array) -> jax.Array:
        return x

    # without blanks, at which JAX cuts names of functions off
    same.__name__ = REPLICATED + ",".join(str(axis).replace(" ", "_") for axis in axes)
    rule = jax.custom_vjp(same)
    rule.defvjp(lambda x: (x, None), functools.partial(_replicated_backward, axes))
    return rule


def _replicated_backward(axes: tuple[str, ...], _: None, g: jax.Array) -> tuple[jax.Array]:
    # As integers: a float `pmax` may lose subnormals. Decoded first, as encoded zeros do not sort as observations.
    greatest = cotangents.from_ordered(lax.pmax(cotangents.to_ordered(cotangents.decode(g)), axes))
    # the sum that JAX takes over the devices then has one term
    return (jnp.where(lax.axis_index(axes) == 0, cotangents.encode(greatest), jnp.zeros_like(greatest)),)


@jax.custom_jvp
def _over_examples(observed: jax.Array, value: jax.Array) -> jax.Array:
    return _over_mapped(observed, value)


# JAX differentiates no `custom_vmap`, and says so without a word about the product
_over_examples.defjvp(refuse_second_order)


@custom_vmap
def _over_mapped(observed: jax.Array, value: jax.Array) -> jax.Array:
    return observed


@_over_mapped.def_vmap
def _(size: int, batched: list[bool], observed: jax.Array, value: jax.Array) -> tuple[jax.Array, bool]:
    observed_differs, value_differs = batched
    # A state that all examples share has one next value: their maximum. JAX would add up.
    if observed_differs and not value_differs:
        # `custom_vmap` puts the examples first. Called again for a `vmap` around this one.
        return _over_mapped(cotangents.maximum_over(observed, 0), value), False
    return _over_mapped(observed, value), observed_differs
