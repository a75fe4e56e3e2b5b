"""Private APIs of JAX; no other module imports `jax._src`.

If a name is missing, `PROBLEM` names it: importing still works, and no kernel is chosen.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import partial_eval

PROBLEM: str | None = None
"""The missing name of this JAX; None if everything was found."""

if not (hasattr(ShapedArray, "mat") or hasattr(ShapedArray, "vma")):
    PROBLEM = f"types of jax {jax.__version__} do not tell along which axes of shard_map arrays vary"


def gpu_triton() -> Any:
    """Return jaxlib's Triton support; it is there with JAX's CUDA plugin alone."""
    from jax._src.lib import gpu_triton

    return gpu_triton


def is_local(context: Any) -> bool:
    """Return whether a program is lowered for one device.

    Its arrays are on one device, or are shards of a `shard_map`.

    Args:
        context: The `module_context.axis_context` of a lowering rule.
    """
    if (devices := getattr(context, "num_devices", None)) is not None:
        return devices == 1
    # inside a shard_map; axes that it does not map are the partitioner's
    mesh = getattr(context, "mesh", None)
    return mesh is None or set(mesh.axis_names) <= set(context.manual_axes)


def on_unused_results(primitive: Primitive, rule: Callable[[Sequence[bool], Any], tuple[list[bool], Any]]) -> None:
    """Register a primitive's rule for unused results.

    Args:
        primitive: It has no effects.
        rule: (which results are used, equation) -> (which operands are used, new equation, or None if it is dead).
    """
    # Since JAX 0.11 rules also take which operands are live, between the two.
    partial_eval.dce_rules[primitive] = lambda used, *rest: rule(used, rest[-1])
