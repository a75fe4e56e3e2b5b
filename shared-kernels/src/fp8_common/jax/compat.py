"""The private APIs of JAX that are used, and types of arrays in `shard_map`. Nothing else here imports `jax._src`.

Where something is missing, `PROBLEM` says what: importing still works, and no kernel is chosen.
"""

from typing import Any, TypeVar

import jax
from jax import lax
from jax.core import ShapedArray
from jax.sharding import NamedSharding, PartitionSpec, get_abstract_mesh

from fp8_common.errors import Fp8UnsupportedError

Tree = TypeVar("Tree")
PROBLEM: str | None = None
"""What this JAX lacks; None if everything was found."""

if not (hasattr(ShapedArray, "mat") or hasattr(ShapedArray, "vma")):
    PROBLEM = f"types of jax {jax.__version__} do not tell along which axes of shard_map arrays vary"


def gpu_triton() -> Any:
    """Return jaxlib's Triton support; it is there with JAX's CUDA plugin alone."""
    from jax._src.lib import gpu_triton

    return gpu_triton


def is_local(context: Any) -> bool:
    """Return whether a program is lowered for arrays that lie on one device: alone, or as shards of a `shard_map`.

    Args:
        context: The `module_context.axis_context` of a lowering rule.
    """
    if (devices := getattr(context, "num_devices", None)) is not None:
        return devices == 1
    # inside a shard_map; axes that it does not map are the partitioner's
    mesh = getattr(context, "mesh", None)
    return mesh is None or set(mesh.axis_names) <= set(context.manual_axes)


def varying_axes(x: Any) -> frozenset[str]:
    """Return the mesh axes along which an array or an abstract value may differ.

    Empty outside of `shard_map(..., check_vma=True)`.

    Raises:
        Fp8UnsupportedError: Inside of a `shard_map`, with a JAX whose types do not tell.
    """
    aval = x if isinstance(x, ShapedArray) else jax.typeof(x)
    # Newer versions of JAX keep these axes in the attribute `mat` ("manual axis type"), older ones in `vma`.
    if (manual := getattr(aval, "mat", None)) is not None:
        return frozenset(manual.varying)
    # No default: with one, a renamed attribute lost the axes, and an amax was that of one device.
    if (axes := getattr(aval, "vma", None)) is None and get_abstract_mesh().manual_axes:
        raise Fp8UnsupportedError(f"FP8 cannot run in shard_map: {PROBLEM}. Install a version of JAX that is tested.")
    return frozenset(axes or ())


def vary_alike(operands: Tree, others: Any = ()) -> Tree:
    """Return operands that all vary along every axis along which one of them, or of `others`, does.

    Args:
        operands: Tree of arrays.
        others: Tree of arrays that the result depends on as well.
    """
    axes = frozenset().union(*(varying_axes(leaf) for leaf in jax.tree.leaves((operands, others))))

    def convert(x: Any) -> Any:
        missing = tuple(sorted(axes - varying_axes(x)))
        return lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(convert, operands)


def typed_like(aval: Any, shape: tuple[int, ...], dtype: Any) -> ShapedArray:
    """Return the type of an array of this shape and dtype that varies along the axes that `aval` varies along."""
    if not varying_axes(aval):
        return ShapedArray(shape, dtype)
    # `update` keeps what it is not told, the axes among it; its name for them depends on the version of JAX.
    sharding = NamedSharding(aval.sharding.mesh, PartitionSpec(*[None] * len(shape)))
    return aval.update(shape=shape, dtype=dtype, weak_type=False, sharding=sharding)
