"""FP8 primary weights that keep their initial high-precision values for the masters.

    with fp8_model_init(preserve_high_precision_init_val=True):
        model = Model()
    fully_shard(model)
    optimizer = MasterOptimizer(torch.optim.AdamW, model.parameters(), lr=1e-3)
    seed_masters(optimizer, model)

The weights of linear layers hold FP8 codes and nothing else.
"""

from fp8_common.plugin import check_version
from fp8_common.torch_layers.linear.config import LinearConfig
from fp8_te_init.build import convert_linear, fp8_model_init
from fp8_te_init.errors import MissingInitError, StaleInitError
from fp8_te_init.linear import PrimaryFloat8Linear
from fp8_te_init.masters.optimizer import MasterOptimizer
from fp8_te_init.masters.seed import rescale_, seed_masters
from fp8_te_init.report import export_fp32_state_dict, memory_report
from fp8_te_init.weight.replicas import broadcast_weights_
from fp8_te_init.weight.slices import quantize_master_weights
from fp8_te_init.weight.tensor import PrimaryFloat8Weight

__version__ = "0.1.0"
check_version("fp8-te-init", __version__)

__all__ = [
    "LinearConfig",
    "MasterOptimizer",
    "MissingInitError",
    "PrimaryFloat8Linear",
    "PrimaryFloat8Weight",
    "StaleInitError",
    "broadcast_weights_",
    "convert_linear",
    "export_fp32_state_dict",
    "fp8_model_init",
    "memory_report",
    "quantize_master_weights",
    "rescale_",
    "seed_masters",
]
