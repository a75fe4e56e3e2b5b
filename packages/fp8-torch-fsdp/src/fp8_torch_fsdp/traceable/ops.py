"""Operator that prevents compilers from keeping gathered weights for the backward.

The backward gathers the same bytes as the forward. A compiler that finds the same operator with the same arguments
merges the two gathers, and keeps the gathered weight between them. A partitioner may also move operators that do not
depend on a gradient into the forward. Therefore the second gather reads a copy of the shard that depends on the
gradient.
"""

import torch


@torch.library.custom_op("fp8_torch_fsdp::copy_in_backward", mutates_args=())
def copy_in_backward(shard: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    """Return a contiguous copy of `shard`; `grad` is not read."""
    return shard.clone(memory_format=torch.contiguous_format)


@copy_in_backward.register_fake
def _(shard: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    return shard.new_empty(shard.shape)
