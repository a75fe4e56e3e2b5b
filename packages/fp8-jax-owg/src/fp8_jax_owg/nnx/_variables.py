"""`OverwriteWithGradient`: the NNX variable type of overwritten values; filters and the optimizer go by it."""

from typing import Any

from flax import nnx

from fp8_jax_owg._marker import COLLECTION, is_marked


class OverwriteWithGradient(nnx.Variable[Any]):
    """A float32 value whose gradient is its next value. It is no `nnx.Param`: no optimizer touches it."""

    is_overwrite_with_gradient = True


# The name that flax's bridges give the type they make of the collection. MaxText's pipelines know the state by it, and
# refuse variables of other names; `__qualname__`, by which pickle finds a class, stays.
OverwriteWithGradient.__name__ = COLLECTION
# Flax's bridges between Linen and NNX look the collection up here, in both directions. Without an entry they make a
# type of their own, which no filter for OverwriteWithGradient finds.
nnx.register_variable_name(COLLECTION, OverwriteWithGradient, overwrite=True)


def is_overwritten(path: Any, value: Any) -> bool:
    """Whether a variable is overwritten with its gradient: of our type, or one that a bridge made; a filter of NNX."""
    return isinstance(value, nnx.Variable) and is_marked(value)
