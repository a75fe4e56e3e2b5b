"""Single leaves that several uses share: into the dtype that combines by MAX and back, over examples and devices."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap

from fp8_common import Fp8Error
from fp8_common.jax.compat import varying_axes
from fp8_jax_owg.state import cotangents
from fp8_jax_owg.state.first_order import refuse_second_order
from fp8_jax_owg.state.max_grad import fp32_max_grad, is_shared


def share_leaf(x: Any) -> jax.Array:
    """Return a float32 array as `fp32_max_grad`; a shared one as it is.

    Raises:
        Fp8Error: It is neither.
    """
    return x if is_shared(x) else _share(check_float32(x))


def as_float32(tree: Any) -> Any:
    """Return a tree with shared leaves read, each for a single use; others must be float32 and stay.

    Raises:
        Fp8Error: A leaf is neither float32 nor shared.
    """
    return jax.tree.map(lambda x: _read(x) if is_shared(x) else check_float32(x), tree)


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


@jax.custom_jvp
def _over_examples(observed: jax.Array, value: jax.Array) -> jax.Array:
    return _over_mapped(observed, value)


# JAX differentiates no `custom_vmap`, and says so without a word about the matmul
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


def adopt_mapping(state: list[Any], others: Any) -> list[Any]:
    """Return state that `vmap` maps wherever it maps one of the other arguments.

    `vmap(grad(loss))` of examples that start from one state asks for a next state of each. Without this the state is
    the same for all examples inside, as in `grad` of a `vmap`, where they share their next state.
    """
    # Only traced values can be mapped.
    traced = [leaf for leaf in jax.tree.leaves(others) if isinstance(leaf, jax.core.Tracer)]
    return _mapped_like(state, traced) if traced and state else state


@jax.custom_jvp
def _mapped_like(state: list[Any], others: list[Any]) -> list[Any]:
    return _mapped_as(state, others)


# as that of `_over_examples`: a gradient is differentiated here
_mapped_like.defjvp(refuse_second_order)


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
    # further levels of vmap see what is left of the others: one example of each
    left = [jnp.moveaxis(x, 0, -1)[..., 0] if is_mapped else x for x, is_mapped in zip(others, batched[1], strict=True)]
    # Called again for a `vmap` around this one, which may map what this one does not.
    return _mapped_as(each, left), [mapped] * len(each)
