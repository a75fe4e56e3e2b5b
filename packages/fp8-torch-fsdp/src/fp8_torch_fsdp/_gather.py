"""What a rank contributes to the all-gather of an FP8 weight: uint8 buffers, cast once and kept until it changes.

The one-argument form of FSDP2's `fsdp_pre_all_gather` is used, because it lets short ranks pad their own buffers; the
number of buffers depends on the world size alone, so ranks always agree. Whether a gather synchronizes depends on where
it happens and never on what this rank did to its weights: the others may not have done it, and would not answer.
"""

from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from fp8_common import Fp8StaleError
from fp8_common.torch.plugin import fsdp
from fp8_torch_fsdp._sync_plan import SyncPlan


def gather_inputs(weight: Any, mesh: DeviceMesh) -> tuple[tuple[torch.Tensor, ...], tuple]:
    """Return what this rank contributes for `weight`, a `ShardedFloat8Weight` or FSDP2's upload of one.

    The cast is cached, except on a GPU that the shard is kept off. The first gather of an FSDP root makes its
    `SyncPlan`. A backward gathers the codes of its forward, where they are kept, whatever was written since.

    Returns:
        uint8 buffers; and as a pair the scales that every rank has and the shape of the gathered weight.
    """
    owner = _owner_of(weight)
    state = owner._state
    plan = state.plan()
    if plan is None or plan.is_due(state):
        # The first gather on a rank is the first one on all: each makes its plan here, and the reductions meet.
        (plan or SyncPlan(fsdp.find_root(owner), type(owner))).synchronize()
    elif state.changes.are_new(owner._data) and not fsdp.in_backward():
        _cast_again(owner)
    if state.wire is not None:
        buffers, scale = state.wire
    else:
        buffers, scale = state.to_wire(weight._data, mesh.size())
        # Under CPU offload the codes are on the GPU, which is to hold nothing of the shard between gathers.
        if state.cache and owner is weight:
            state.wire = buffers, scale
    return buffers, (scale, state.geometry.full_shape)


def _cast_again(owner: Any) -> None:
    """Drop the kept cast of a weight that was written to since its root's forward began; its scale stays.

    Raises:
        Fp8StaleError: It has outgrown the scale that the ranks agreed on.
    """
    state = owner._state
    keys = state.strategy.local_keys(owner._data, state.geometry)
    # Keys are the bits of floats that are not negative, so integers compare like the maxima. A smaller one is no error:
    # the scale of before holds it.
    if state.agreed is not None and (keys.to(state.agreed.device) > state.agreed).any():
        raise Fp8StaleError(
            f"{state.name} was changed inside of the forward of its FSDP root and has outgrown the scale that the "
            "ranks agreed on before. Change weights before the forward of the root."
        )
    state.wire = None


def _owner_of(weight: Any) -> Any:
    """Return the weight that FSDP2 shards: `weight` itself, unless CPU offload gathers a copy of it on the GPU."""
    state = weight._state
    origin = state.origin()
    if origin is None or state.plan() is not None:
        return weight
    return next((shard for shard in fsdp.offloaded_shards() if getattr(shard, "_state", None) is origin), weight)
