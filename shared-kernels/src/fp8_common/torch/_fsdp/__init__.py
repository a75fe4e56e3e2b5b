"""FSDP2, as far as all PyTorch plugins need it: its private parts, and the buffers that FP8 weights travel in.

`compat` is the one place that touches private parts of FSDP2.
"""

from fp8_common.torch._fsdp.buffers import pad_rows, refill, unpad
from fp8_common.torch._fsdp.compat import (
    ShardedParam,
    all_gather_of,
    alone_on_device,
    at_end_of_backward,
    before_gathers,
    find_root,
    gradient_sync_enabled,
    group_of,
    held_parameters,
    in_any_forward,
    in_backward,
    in_forward,
    meshes_of,
    named_shards,
    offloaded_shards,
    parameters_of,
    params_of_module,
    ranks_along,
    reductions_of,
    reshard_gathered,
    sharded_params,
)

__all__ = [
    "ShardedParam",
    "all_gather_of",
    "alone_on_device",
    "at_end_of_backward",
    "before_gathers",
    "find_root",
    "gradient_sync_enabled",
    "group_of",
    "held_parameters",
    "in_any_forward",
    "in_backward",
    "in_forward",
    "meshes_of",
    "named_shards",
    "offloaded_shards",
    "pad_rows",
    "parameters_of",
    "params_of_module",
    "ranks_along",
    "reductions_of",
    "refill",
    "reshard_gathered",
    "sharded_params",
    "unpad",
]
