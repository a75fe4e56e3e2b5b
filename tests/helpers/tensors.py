"""Tensors, sharded or not: whether two have the same bits, and what becomes of them on shards and in files."""

import io
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor


def same(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have the same dtype, shape and bits."""
    bits = [one.detach().contiguous().view(-1).view(torch.uint8) for one in (a, b)]
    return (a.dtype, a.shape) == (b.dtype, b.shape) and torch.equal(*bits)


def whole(tensor: Tensor) -> Tensor:
    """Return the tensor of all ranks, where it is cut."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def placed_like(tensor: Tensor, like: Tensor) -> Tensor:
    """Return a tensor that every rank has whole, cut as another one is."""
    return distribute_tensor(tensor, like.device_mesh, like.placements) if isinstance(like, DTensor) else tensor


def reloaded(value: Any, *, weights_only: bool = True) -> Any:
    """Return what is read of a file that `value` was saved in."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=weights_only)
