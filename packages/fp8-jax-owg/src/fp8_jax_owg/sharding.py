"""Types of arrays on meshes: shardings over explicit axes.

On such a mesh (`jax.sharding.AxisType.Explicit`) the sharding of an array is part of its type. JAX then wants to be
told how the result of a matmul is sharded that sums over a sharded dimension, as both gradients of a layer do.
"""

from collections.abc import Sequence
from typing import Any

import jax
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from fp8_common import Fp8UnsupportedError


def explicit_sharding(like: jax.Array, order: Sequence[int]) -> NamedSharding | None:
    """Return the sharding of an array with its dimensions in another order; None unless its mesh has explicit axes."""
    sharding = jax.typeof(like).sharding
    if AxisType.Explicit not in sharding.mesh.axis_types:
        return None
    return NamedSharding(sharding.mesh, PartitionSpec(*(sharding.spec[i] for i in order)))


def result_sharding(sharding: Any, order: Sequence[int]) -> NamedSharding | None:
    """Return what `lax.dot_general` is told of its result; None where axes are automatic, see `constrain`.

    Args:
        sharding: As a layer was asked for: a `PartitionSpec`, a `NamedSharding`, or None.
        order: Which dimension of the result of the layer is which of that of the matmul.
    """
    mesh = _mesh_of(sharding)
    if mesh is None or AxisType.Explicit not in mesh.axis_types:
        return None
    spec = sharding.spec if isinstance(sharding, NamedSharding) else sharding
    parts = (*spec, *[None] * (len(order) - len(spec)))
    return NamedSharding(mesh, PartitionSpec(*(parts[i] for i in order)))


def constrain(x: jax.Array, sharding: Any) -> jax.Array:
    """Return `x` with the sharding that a layer was asked for, or None."""
    mesh = _mesh_of(sharding)
    if mesh is None:
        return x
    # Over explicit axes `with_sharding_constraint` only asserts what the type says; resharding changes it.
    place = jax.sharding.reshard if AxisType.Explicit in mesh.axis_types else lax.with_sharding_constraint
    return place(x, sharding)


def _mesh_of(sharding: Any) -> Any:
    if sharding is None:
        return None
    return sharding.mesh if isinstance(sharding, NamedSharding) else jax.sharding.get_abstract_mesh()


def refuse_explicit_axes(what: str, tree: Any) -> None:
    """Raise if an array is sharded over an explicit axis.

    Args:
        what: What does not run with such arrays.
        tree: Arrays.

    Raises:
        Fp8UnsupportedError: One is, with the remedy.
    """
    for leaf in jax.tree.leaves(tree):
        sharding = jax.typeof(leaf).sharding
        axes = dict(zip(sharding.mesh.axis_names, sharding.mesh.axis_types, strict=True))
        names = [name for part in sharding.spec for name in (part if isinstance(part, tuple) else (part,))]
        if explicit := [name for name in names if axes.get(name) is AxisType.Explicit]:
            raise Fp8UnsupportedError(
                f"{what} cannot run on arrays that are sharded over explicit mesh axes, got {', '.join(explicit)}. "
                "Wrap the function in jax.sharding.auto_axes, or make the mesh with AxisType.Auto."
            )
