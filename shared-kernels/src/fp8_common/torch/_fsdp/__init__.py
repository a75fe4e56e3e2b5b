"""FP8 weights on FSDP2's all-gather: the uint8 wire, tracking of changes, and scale synchronization.

What every plugin with FP8 weights under `fully_shard` shares. A plugin brings a tensor subclass with `_data` (the
plain shard) and `_state` (a `WeightState`), and a `WireStrategy` for each kind of scaling.
"""

from fp8_common.torch._fsdp.compat import group_of, meshes_of, named_shards, ranks_along
from fp8_common.torch._fsdp.sync import SyncPlan
from fp8_common.torch._fsdp.weight_state import (
    StepCounter,
    WeightState,
    WireStrategy,
    is_view,
    mark_mutations,
    track_optimizer_steps,
)
from fp8_common.torch._fsdp.wire import gather_inputs, pad_rows, refill, unpad

__all__ = [
    "StepCounter",
    "SyncPlan",
    "WeightState",
    "WireStrategy",
    "gather_inputs",
    "group_of",
    "is_view",
    "mark_mutations",
    "meshes_of",
    "named_shards",
    "pad_rows",
    "ranks_along",
    "refill",
    "track_optimizer_steps",
    "unpad",
]
