"""torchtitan's Llama 3 in FP8: configurations for its own `torchtitan.train`.

    torchrun --nproc-per-node 8 -m torchtitan.train --module examples.torchtitan_fp8 --config llama3_8b_fp8 \
        --compile.enable

For torchtitan 0.3. Every other option of torchtitan works as before.
"""

from torchtitan.models.llama3 import config_registry, model_registry
from torchtitan.trainer import Trainer

from fp8_torch_fsdp.integrations.torchtitan import Float8Converter


def in_fp8(config: Trainer.Config, **options: object) -> Trainer.Config:
    """Return a configuration of Llama 3 with FP8 layers; options are those of `Float8Converter.Config`."""
    config.model_spec = model_registry(config.model_spec.flavor, converters=[Float8Converter.Config(**options)])
    config.parallelism.spmd_backend = "partial_dtensor"  # the default refuses the parameters of FP8 layers
    config.training.disable_cuda_graphs = True  # never tried with FP8 all-gather
    return config


def llama3_8b_fp8() -> Trainer.Config:
    """Return Llama 3 8B, in FP8 where layers are large enough to gain."""
    return in_fp8(config_registry.llama3_8b(), recipe="tensorwise", skip_small=True)


def llama3_debugmodel_fp8() -> Trainer.Config:
    """Return torchtitan's debug model, every layer but the output projection in FP8."""
    return in_fp8(config_registry.llama3_debugmodel(), recipe="tensorwise")
