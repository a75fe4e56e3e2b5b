"""FP8 linear layers for PyTorch whose weights FSDP2 all-gathers in FP8.

    >>> import torch
    >>> from torch import nn
    >>> from fp8_torch_fsdp import convert_to_float8_training, float8_report
    >>> model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    >>> model = convert_to_float8_training(model)  # under torchrun, then fully_shard(model)
    >>> model(torch.ones(8, 64)).sum().backward()
    >>> print(float8_report(model).headline)
    98.5% of the weights converted, ...

The training loop does not change: scales are computed before each forward, in one all-reduce per process group (static
and MX scales need none). `compress_communication` gathers weights and reduces gradients of layers of any kind in FP8.
`DelayedState` saves the state of delayed scaling in checkpoints.
"""

from fp8_common import CastRecipe, GradientCompression, Recipe
from fp8_common.plugin import check_version
from fp8_common.torch_layers.linear.config import GemmConfig
from fp8_common.torch_layers.sharding.gathered import GatheredWeight
from fp8_torch_fsdp.all_gather.mx_all_gather import MatrixGatherStats
from fp8_torch_fsdp.all_gather.sharded_weight import ShardedFloat8Weight
from fp8_torch_fsdp.compress import CompressedCommunication, compress_communication
from fp8_torch_fsdp.config import DelayedScalingConfig, Float8TrainingConfig
from fp8_torch_fsdp.convert.expert_layouts import ExpertLayout
from fp8_torch_fsdp.convert.model import convert_to_float8_training, unconvert
from fp8_torch_fsdp.convert.report import float8_report
from fp8_torch_fsdp.convert.select import auto_filter_for_recipe
from fp8_torch_fsdp.expert_parallel.dispatch import DispatchedTokens, dispatch_tokens
from fp8_torch_fsdp.layers.experts import Float8Experts
from fp8_torch_fsdp.layers.linear import Float8Linear
from fp8_torch_fsdp.monitor import Float8Monitor
from fp8_torch_fsdp.scales.checkpoint import DelayedState
from fp8_torch_fsdp.scales.sync import synchronize_scales
from fp8_torch_fsdp.scales.unchanged import weights_unchanged
from fp8_torch_fsdp.step_log import Float8Log
from fp8_torch_fsdp.tensor_parallel.styles import (
    Float8ColwiseParallel,
    Float8RowwiseParallel,
    PrepareFloat8ModuleInput,
)
from fp8_torch_fsdp.traceable.shard import fully_shard_traceable

__version__ = "0.1.0"
check_version("fp8-torch-fsdp", __version__)

__all__ = [
    "CastRecipe",
    "CompressedCommunication",
    "DelayedScalingConfig",
    "DelayedState",
    "DispatchedTokens",
    "ExpertLayout",
    "Float8ColwiseParallel",
    "Float8Experts",
    "Float8Linear",
    "Float8Log",
    "Float8Monitor",
    "Float8RowwiseParallel",
    "Float8TrainingConfig",
    "GatheredWeight",
    "GemmConfig",
    "GradientCompression",
    "MatrixGatherStats",
    "PrepareFloat8ModuleInput",
    "Recipe",
    "ShardedFloat8Weight",
    "auto_filter_for_recipe",
    "compress_communication",
    "convert_to_float8_training",
    "dispatch_tokens",
    "float8_report",
    "fully_shard_traceable",
    "synchronize_scales",
    "unconvert",
    "weights_unchanged",
]
