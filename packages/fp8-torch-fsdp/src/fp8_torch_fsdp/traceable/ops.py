"""The operator that keeps a compiler from undoing the release of gathered weights between forward and backward.

The backward gathers the same bytes as the forward. A compiler that sees the same operator with the same arguments
merges both and keeps the gathered weight alive in between, and a partitioner may move whatever needs no gradient into
the forward. So the second gather takes a copy of the shard that, as far as anyone can see, depends on the gradient.
"""

import torch


@torch.library.custom_op("fp8_torch_fsdp::copy_in_backward", mutates_args=())
def copy_in_backward(shard: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    """Return a contiguous copy of `shard`, this rank's part of a weight, when the backward has reached `grad`."""
    return shard.clone(memory_format=torch.contiguous_format)


@copy_in_backward.register_fake
def _(shard: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    return shard.new_empty(shard.shape)
