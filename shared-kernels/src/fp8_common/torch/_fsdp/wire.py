"""Decides how FP8 shards travel through FSDP2's all-gather: as contiguous uint8 buffers of constant number and size.

uint8, because gloo and older NCCL refuse float8. The one-argument form of `fsdp_pre_all_gather` is used, because it
lets short ranks pad their own buffers; the number of buffers depends on the world size alone, so ranks always agree.
"""

import math

import torch
from torch.distributed.device_mesh import DeviceMesh

from fp8_common.torch._fsdp import compat
from fp8_common.torch._fsdp.sync import SyncPlan
from fp8_common.torch._fsdp.weight_state import TrackedWeight


def gather_inputs(weight: TrackedWeight, mesh: DeviceMesh) -> tuple[tuple[torch.Tensor, ...], tuple]:
    """Return what this rank contributes for `weight`, a tracked shard or FSDP2's upload of one, and what it keeps.

    The cast is cached, except on a GPU that the shard is kept off. The first gather of an FSDP root makes its
    `SyncPlan`; a weight that changed since the last synchronization is synchronized here, which all ranks reach
    together.

    Returns:
        uint8 buffers; and as a pair the scales that every rank has and the shape of the gathered weight.
    """
    owner = _owner_of(weight)
    state = owner._state
    plan = state.plan() or SyncPlan(compat.find_root(owner), type(owner))
    if state.is_stale(owner._data):
        plan.synchronize()
    if state.wire is None:
        buffers, scale = state.strategy.to_wire(weight._data, state, mesh.size())
        state.casts += 1
        if not state.cache or owner is not weight:
            return buffers, (scale, state.full_shape)
        state.wire = buffers, scale
    buffers, scale = state.wire
    return buffers, (scale, state.full_shape)


def _owner_of(weight: TrackedWeight) -> TrackedWeight:
    """Return the weight that FSDP2 shards: `weight` itself, unless CPU offload gathers a copy of it on the GPU."""
    state = weight._state
    origin = state.origin()
    if origin is None or state.plan() is not None:
        return weight
    return next((shard for shard in compat.offloaded_shards() if getattr(shard, "_state", None) is origin), weight)


def pad_rows(codes: torch.Tensor, padded_shape: torch.Size) -> torch.Tensor:
    """Return float8 or uint8 `codes` as contiguous uint8 of `padded_shape`, zeros below the rows it has."""
    data = codes.view(torch.uint8)
    if data.shape == padded_shape:
        return data.contiguous()
    padded = data.new_zeros(padded_shape)
    if data.numel():
        padded[: data.shape[0]] = data
    return padded


def unpad(gathered: torch.Tensor, full_shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """Return the gathered uint8 buffer as `dtype` of `full_shape`, without a copy: padding is at the end."""
    return gathered.view(-1)[: math.prod(full_shape)].view(dtype).view(full_shape)


def refill(target: torch.Tensor, source: torch.Tensor) -> None:
    """Overwrite a tensor that autograd may have saved, without counting as a change: FSDP2 restores, not modifies."""
    with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(target):
        target.copy_(source)
