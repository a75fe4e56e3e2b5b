"""FP8 linear layers for PyTorch whose weights FSDP2 all-gathers in FP8.

    model = convert_to_float8_training(model)
    fully_shard(model)

Nothing else changes in a training loop: scales are synchronized with one all-reduce per step, automatically.
"""

from fp8_common.plugins import check_version
from fp8_torch_fsdp.config import AllGatherConfig, CastConfig, Float8LinearConfig, GemmConfig
from fp8_torch_fsdp.convert import convert_to_float8_training
from fp8_torch_fsdp.counters import amax_reduction_count, cast_count
from fp8_torch_fsdp.gathered import GatheredFloat8Weight
from fp8_torch_fsdp.linear import Float8Linear
from fp8_torch_fsdp.sharded import ShardedFloat8Weight

__version__ = "0.1.0"
check_version("fp8-torch-fsdp", __version__)

__all__ = [
    "AllGatherConfig",
    "CastConfig",
    "Float8Linear",
    "Float8LinearConfig",
    "GatheredFloat8Weight",
    "GemmConfig",
    "ShardedFloat8Weight",
    "amax_reduction_count",
    "cast_count",
    "convert_to_float8_training",
]
