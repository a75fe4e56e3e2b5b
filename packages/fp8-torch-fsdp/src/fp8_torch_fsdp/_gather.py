"""What a rank contributes to the all-gather of an FP8 weight: uint8 buffers, cast once and kept until it changes.

The one-argument form of FSDP2's `fsdp_pre_all_gather` is used, because it lets short ranks pad their own buffers; the
number of buffers depends on the world size alone, so ranks always agree.
"""

from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from fp8_common.torch.plugin import fsdp
from fp8_torch_fsdp._sync_plan import SyncPlan


def gather_inputs(weight: Any, mesh: DeviceMesh) -> tuple[tuple[torch.Tensor, ...], tuple]:
    """Return what this rank contributes for `weight`, a `ShardedFloat8Weight` or FSDP2's upload of one.

    The cast is cached, except on a GPU that the shard is kept off. The first gather of an FSDP root makes its
    `SyncPlan`; a weight that changed since the last synchronization is synchronized here, which all ranks reach
    together.

    Returns:
        uint8 buffers; and as a pair the scales that every rank has and the shape of the gathered weight.
    """
    owner = _owner_of(weight)
    state = owner._state
    plan = state.plan() or SyncPlan(fsdp.find_root(owner), type(owner))
    if state.changes.are_new(owner._data):
        plan.synchronize()
    if state.wire is not None:
        buffers, scale = state.wire
    else:
        buffers, scale = state.to_wire(weight._data, mesh.size())
        if state.cache and owner is weight:
            state.wire = buffers, scale
    return buffers, (scale, state.geometry.full_shape)


def _owner_of(weight: Any) -> Any:
    """Return the weight that FSDP2 shards: `weight` itself, unless CPU offload gathers a copy of it on the GPU."""
    state = weight._state
    origin = state.origin()
    if origin is None or state.plan() is not None:
        return weight
    return next((shard for shard in fsdp.offloaded_shards() if getattr(shard, "_state", None) is origin), weight)
