"""FP8 linear layers for PyTorch whose weights FSDP2 all-gathers in FP8.

    model = convert_to_float8_training(model)
    fully_shard(model)

Nothing else changes in a training loop: scales are synchronized with one all-reduce per forward, automatically.
"""

from fp8_common import GradientCompression, Recipe
from fp8_common.plugin import check_version
from fp8_common.torch import GemmConfig, load_checkpoint, save_checkpoint, verify_checkpoint
from fp8_common.torch.plugin import GatheredFloat8Weight
from fp8_torch_fsdp._communication import enable_float8_all_gather
from fp8_torch_fsdp._config import (
    AllGatherConfig,
    CastConfig,
    DelayedScalingConfig,
    Float8LinearConfig,
)
from fp8_torch_fsdp._conversion_report import ClassReport, ConversionReport, float8_conversion_report
from fp8_torch_fsdp._convert import convert_to_float8_training, unconvert
from fp8_torch_fsdp._counters import amax_reduction_count, cast_count
from fp8_torch_fsdp._expert_layouts import ExpertLayout
from fp8_torch_fsdp._experts import Float8Experts
from fp8_torch_fsdp._filters import auto_filter_for_recipe
from fp8_torch_fsdp._gradients.compress import CompressedGradients, compress_gradients
from fp8_torch_fsdp._linear import Float8Linear
from fp8_torch_fsdp._mark_changed import mark_weights_changed
from fp8_torch_fsdp._monitor import Float8Monitor
from fp8_torch_fsdp._offsets_check import GroupOffsetsCheck
from fp8_torch_fsdp._report import CommunicationReport, WeightReport, float8_communication_report
from fp8_torch_fsdp._secondary_shards import SecondaryShards, keep_secondary_shards
from fp8_torch_fsdp._serving import export_for_serving
from fp8_torch_fsdp._sharded import ShardedFloat8Weight
from fp8_torch_fsdp._synchronize import (
    Float8Controller,
    precompute_float8_dynamic_scale_for_fsdp,
    settle_delayed_scales,
    sync_float8_amax_and_scale_history,
)
from fp8_torch_fsdp._tensor_parallel import (
    Float8ColwiseParallel,
    Float8RowwiseParallel,
    PrepareFloat8ModuleInput,
)
from fp8_torch_fsdp._token_exchange import DispatchedTokens, TokenWire, dispatch_tokens
from fp8_torch_fsdp._traceable import fully_shard_traceable

__version__ = "0.1.0"
check_version("fp8-torch-fsdp", __version__)

__all__ = [
    "AllGatherConfig",
    "CastConfig",
    "ClassReport",
    "CommunicationReport",
    "CompressedGradients",
    "ConversionReport",
    "DelayedScalingConfig",
    "DispatchedTokens",
    "ExpertLayout",
    "Float8ColwiseParallel",
    "Float8Controller",
    "Float8Experts",
    "Float8Linear",
    "Float8LinearConfig",
    "Float8Monitor",
    "Float8RowwiseParallel",
    "GatheredFloat8Weight",
    "GemmConfig",
    "GradientCompression",
    "GroupOffsetsCheck",
    "PrepareFloat8ModuleInput",
    "Recipe",
    "SecondaryShards",
    "ShardedFloat8Weight",
    "TokenWire",
    "WeightReport",
    "amax_reduction_count",
    "auto_filter_for_recipe",
    "cast_count",
    "compress_gradients",
    "convert_to_float8_training",
    "dispatch_tokens",
    "enable_float8_all_gather",
    "export_for_serving",
    "float8_communication_report",
    "float8_conversion_report",
    "fully_shard_traceable",
    "keep_secondary_shards",
    "load_checkpoint",
    "mark_weights_changed",
    "precompute_float8_dynamic_scale_for_fsdp",
    "save_checkpoint",
    "settle_delayed_scales",
    "sync_float8_amax_and_scale_history",
    "unconvert",
    "verify_checkpoint",
]
