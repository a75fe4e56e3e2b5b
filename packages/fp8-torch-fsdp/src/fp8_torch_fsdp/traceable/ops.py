"""Operator that keeps compilers from extending gathered weights' lifetimes.

The backward gathers the same bytes as the forward. A compiler that finds the same operator with the same arguments
merges both and keeps the gathered weight alive in between, and a partitioner may move operators that need no gradient
into the forward. So the second gather reads a copy of the shard that formally depends on the gradient.
"""

import torch


@torch.library.custom_op("fp8_torch_fsdp::copy_in_backward", mutates_args=())
def copy_in_backward(shard: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    """Return a contiguous copy of `shard` once the backward reaches `grad`."""
    return shard.clone(memory_format=torch.contiguous_format)


@copy_in_backward.register_fake
def _(shard: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    return shard.new_empty(shard.shape)
