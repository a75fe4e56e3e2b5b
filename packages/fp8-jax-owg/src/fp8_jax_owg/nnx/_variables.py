"""`OverwriteWithGradient`: the NNX variable type of overwritten values; filters and the optimizer go by it."""

from typing import Any

from flax import nnx


class OverwriteWithGradient(nnx.Variable[Any]):
    """A float32 value whose gradient is its next value. It is no `nnx.Param`: no optimizer touches it."""

    is_overwrite_with_gradient = True
