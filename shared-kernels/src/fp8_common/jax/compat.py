"""Private APIs of JAX; no other module imports `jax._src`.

If this JAX lacks a name, `PROBLEM` describes it: the import still works, and no kernel is used.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import partial_eval

PROBLEM: str | None = None
"""Problem of this version of JAX, as a clause; None if there is no problem."""

if not (hasattr(ShapedArray, "mat") or hasattr(ShapedArray, "vma")):
    PROBLEM = f"types of jax {jax.__version__} do not show along which axes of shard_map arrays vary"


def gpu_triton() -> Any:
    """Return jaxlib's Triton support, which requires JAX's CUDA plugin."""
    from jax._src.lib import gpu_triton

    return gpu_triton


def is_local(context: Any) -> bool:
    """Return whether lowered arrays are on one device.

    This includes shards inside of a `shard_map` over all mesh axes.

    Args:
        context: `module_context.axis_context` of a lowering rule.
    """
    if (devices := getattr(context, "num_devices", None)) is not None:
        return devices == 1
    # Inside of a shard_map. The partitioner shards along the axes that it does not map.
    mesh = getattr(context, "mesh", None)
    return mesh is None or set(mesh.axis_names) <= set(context.manual_axes)


def on_unused_results(primitive: Primitive, rule: Callable[[Sequence[bool], Any], tuple[list[bool], Any]]) -> None:
    """Register a rule for unused results of a primitive.

    Args:
        primitive: Primitive without effects.
        rule: Function (used results, equation) that returns the used operands, and the new equation or None if no
            result is used.
    """
    # Since JAX 0.11, rules have another argument between these two, the live operands.
    partial_eval.dce_rules[primitive] = lambda used, *rest: rule(used, rest[-1])
