"""FP8 linear layers for PyTorch whose weights FSDP2 all-gathers in FP8.

    model = convert_to_float8_training(model)
    fully_shard(model)

Nothing else changes in a training loop: scales are synchronized with one all-reduce per forward, automatically.
"""

from fp8_common import GradientCompression, Recipe
from fp8_common.plugin import check_version
from fp8_common.torch import GemmConfig
from fp8_common.torch.plugin import GatheredFloat8Weight
from fp8_torch_fsdp._communication import enable_float8_all_gather
from fp8_torch_fsdp._config import (
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
from fp8_torch_fsdp._linear import Float8Linear
from fp8_torch_fsdp._mark_changed import mark_weights_changed
from fp8_torch_fsdp._monitor import Float8Monitor
from fp8_torch_fsdp._report import CommunicationReport, WeightReport, float8_communication_report
from fp8_torch_fsdp._serving import export_for_serving
from fp8_torch_fsdp._sharded import ShardedFloat8Weight
from fp8_torch_fsdp._synchronize import (
    settle_delayed_scales,
    synchronize_scales,
)
from fp8_torch_fsdp._tensor_parallel import (
    Float8ColwiseParallel,
    Float8RowwiseParallel,
    PrepareFloat8ModuleInput,
)
from fp8_torch_fsdp._traceable import fully_shard_traceable
from fp8_torch_fsdp.reduce_scatter import compress_gradients

__version__ = "0.1.0"
check_version("fp8-torch-fsdp", __version__)

__all__ = [
    "CastConfig",
    "ClassReport",
    "CommunicationReport",
    "ConversionReport",
    "DelayedScalingConfig",
    "ExpertLayout",
    "Float8ColwiseParallel",
    "Float8Experts",
    "Float8Linear",
    "Float8LinearConfig",
    "Float8Monitor",
    "Float8RowwiseParallel",
    "GatheredFloat8Weight",
    "GemmConfig",
    "GradientCompression",
    "PrepareFloat8ModuleInput",
    "Recipe",
    "ShardedFloat8Weight",
    "WeightReport",
    "amax_reduction_count",
    "auto_filter_for_recipe",
    "cast_count",
    "compress_gradients",
    "convert_to_float8_training",
    "enable_float8_all_gather",
    "export_for_serving",
    "float8_communication_report",
    "float8_conversion_report",
    "fully_shard_traceable",
    "mark_weights_changed",
    "settle_delayed_scales",
    "synchronize_scales",
    "unconvert",
]
