"""What users do to a weight: writes of every kind, collectives of their own, and what reads it."""

import copy
import ctypes
import io
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import fp8_torch_fsdp as f8


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return what this rank holds."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def set_data(tensor: torch.Tensor, factor: float) -> None:
    """Not of plain parameters, whose `.data` FSDP2 itself does not look at again."""
    # `to_local()` of a parameter is an alias of it, whose `.data` is its own
    local = getattr(tensor, "_local_tensor", tensor)
    if isinstance(local, f8.ShardedFloat8Weight):
        local.data = local.plain * factor
    else:
        local.mul_(factor)


def multiply_at(tensor: torch.Tensor, factor: float) -> None:
    """As fused kernels and bitsandbytes write: no operator, no version."""
    local = local_of(tensor)
    if local.dtype != torch.float32:
        local.mul_(factor)
    elif local.numel():
        values = (ctypes.c_float * local.numel()).from_address(local.data_ptr())
        values[:] = [factor * value for value in values]


def with_numpy(tensor: torch.Tensor, factor: float) -> None:
    """NumPy has no bfloat16."""
    local = local_of(tensor)
    if local.dtype == torch.bfloat16:
        local.mul_(factor)
    else:
        local.detach().numpy()[...] *= factor


EDITS: dict[str, Callable[[torch.Tensor, float], Any]] = {
    "mul": torch.Tensor.mul_,
    "state_dict": torch.Tensor.mul_,
    "data": lambda tensor, factor: tensor.data.mul_(factor),
    "copy": lambda tensor, factor: tensor.copy_(tensor.detach() * factor),
    "view": lambda tensor, factor: local_of(tensor).view(-1)[::2].mul_(factor),
    "foreach": lambda tensor, factor: torch._foreach_mul_([tensor], factor),
    "local_data": lambda tensor, factor: local_of(tensor).data.mul_(factor),
    "set_data": set_data,
    "numpy": with_numpy,
    "dlpack": lambda tensor, factor: torch.from_dlpack(local_of(tensor).detach()).mul_(factor),
    "address": multiply_at,
}
"""Ways to multiply a parameter, or what a state dict holds."""

COLLECTIVES: dict[str, Callable[[torch.Tensor], Any]] = {
    "all_reduce": lambda local: dist.all_reduce(local.data),
    "broadcast": lambda local: dist.broadcast(local, 0),
    "all_gather": lambda local: dist.all_gather_into_tensor(
        local.view(-1), torch.full((local.numel() // 2,), 1.0 + dist.get_rank())
    ),
    "recv": lambda local: dist.send(local * 2, 0) if dist.get_rank() else dist.recv(local, 1),
}
"""Collectives that write to even shards of two ranks; of two, only one receives."""

READERS: dict[str, Callable[[Any], Any]] = {
    "state_dict": lambda model: model.state_dict(),
    "state_dict with variables": lambda model: model.state_dict(keep_vars=True),
    "copied state_dict": lambda model: copy.deepcopy(model.state_dict()),
    "saved state_dict": lambda model: torch.save(model.state_dict(), io.BytesIO()),
    "repr": repr,
    "named_parameters": lambda model: [(n, p.shape, local_of(p).sum()) for n, p in model.named_parameters()],
    "data": lambda model: [local_of(p.data) for p in model.parameters()],
    "values": lambda model: [local_of(value).detach().clone() for value in model.state_dict().values()],
}
